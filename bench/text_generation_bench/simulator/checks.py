"""What is checked while a simulation runs: cheap rules always, the content of every KV block where asked for."""

from __future__ import annotations

from collections.abc import Collection

from text_generation_bench.simulator.machine import Machine
from text_generation_bench.simulator.shard import BrokenRule, Sequence, SimulatedShard, Span
from text_generation_router.request import RequestId
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.steps import Orders


def check_orders(orders: Orders, policy: Policy) -> None:
    """Orders keep the prefill budget."""
    if (tokens := sum([chunk for _, chunk in orders.prefill])) > policy.max_batch_prefill_tokens:
        raise BrokenRule(f"{tokens} prompt tokens are ordered for one step")


class KvAudit:
    """What every KV block of a replica holds, token by token: slow, and told by nobody but the steps themselves.

    The KV of a position depends on all tokens up to it, so it is written down as their hash.
    """

    def __init__(self, machine: Machine, num_blocks: int, ids: tuple[int, ...]) -> None:
        self._block_size = machine.block_size
        self._num_blocks = num_blocks
        self._ids = ids
        self._kv: dict[int, int] = {}
        """By block · block_size + place in it."""
        self._chains: dict[RequestId, list[int]] = {}

    def clear(self) -> None:
        """A new session: nothing is held."""
        self._kv.clear()
        self._chains.clear()

    def admitted(self, orders: Orders, shard: SimulatedShard) -> None:
        """Orders were applied: what they say is cached is there, and nobody writes where another one reads."""
        starts = {admission.slot: admission.cached_tokens for admission in orders.admit}
        readers: dict[int, int] = {}
        held = shard.held
        for sequence in held:
            for block in sequence.blocks:
                if not 0 <= block < self._num_blocks:
                    raise BrokenRule(f"block {block} is none of {self._num_blocks}")
                readers[block] = readers.get(block, 0) + 1
            if len(set(sequence.blocks)) != len(sequence.blocks):
                raise BrokenRule(f"slot {sequence.slot} holds a block twice")
        for sequence in held:
            writes_from = self._computed(sequence) // self._block_size
            for block in sequence.blocks[writes_from:]:
                if readers[block] > 1:
                    raise BrokenRule(f"slot {sequence.slot} writes block {block}, which another one holds")
        for sequence in held:
            if sequence.slot in starts:
                chain = self._chain(sequence)
                for position in range(starts[sequence.slot]):
                    if self._kv.get(self._place(sequence, position)) != chain[position]:
                        raise BrokenRule(f"slot {sequence.slot} finds foreign KV at position {position}")

    def stepped(self, span: Span, steps: int) -> None:
        """`steps` steps of `span` are about to be recorded: every position they compute is written."""
        for sequence, chunk in span.chunks:
            self._write(sequence, sequence.computed, sequence.computed + chunk)
        for sequence in span.decoding:
            computed = self._computed(sequence)
            self._write(sequence, computed, computed + steps)

    def _write(self, sequence: Sequence, start: int, end: int) -> None:
        if end > len(sequence.blocks) * self._block_size:
            raise BrokenRule(f"slot {sequence.slot} runs past its grant")
        chain = self._chain(sequence)
        for position in range(start, end):
            self._kv[self._place(sequence, position)] = chain[position]

    def _computed(self, sequence: Sequence) -> int:
        prefilling = sequence.computed < sequence.prompt_length
        return sequence.computed if prefilling else sequence.at + sequence.shift - 1

    def _place(self, sequence: Sequence, position: int) -> int:
        size = self._block_size
        return sequence.blocks[position // size] * size + position % size

    def _chain(self, sequence: Sequence) -> list[int]:
        """The hash of each prefix of a request's whole text."""
        chain = self._chains.get(sequence.request_id)
        if chain is None:
            arrival = sequence.arrival
            answer = self._ids[arrival.answer_at : arrival.answer_at + arrival.new_tokens]
            chain, prefix = [], 0
            for token in (*arrival.prompt, *answer):
                prefix = hash((prefix, token))
                chain.append(prefix)
            self._chains[sequence.request_id] = chain
        return chain

    def forget(self, finished: Collection[int], span: Span) -> None:
        """The sequences of `span` in the slots of `finished` are over."""
        for sequence in (*span.decoding, *(one for one, _ in span.chunks)):
            if sequence.slot in finished:
                self._chains.pop(sequence.request_id, None)
