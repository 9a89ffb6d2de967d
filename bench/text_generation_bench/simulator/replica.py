"""One simulated replica: its shard, the orders in flight, and checks of its orders and KV blocks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from text_generation_bench.simulator.cost_model import CostModel
from text_generation_bench.simulator.shard import RuleViolation, SimSequence, SimulatedShard, StepSpan
from text_generation_bench.simulator.traces import Arrival
from text_generation_proto.copies import Copy, CopyEnd
from text_generation_router.request import RequestId
from text_generation_router.scheduling.messages import SchedulerOutput
from text_generation_router.scheduling.policy import Policy


def check_orders(orders: SchedulerOutput, policy: Policy) -> None:
    """Check that orders keep the prefill budget. Raises RuleViolation."""
    if (tokens := sum([chunk for _, chunk in orders.prefill])) > policy.max_batch_prefill_tokens:
        raise RuleViolation(f"{tokens} prompt tokens are ordered for one step")


HostContents = dict[int, list[int]]
"""The content of each block of a host cache."""


class KvAudit:
    """The content of every KV block of a replica, token by token, derived only from the steps. Slow.

    The KV of a position depends on all tokens up to it and is represented by their hash.
    """

    def __init__(self, cost_model: CostModel, num_blocks: int, ids: tuple[int, ...]) -> None:
        self._block_size = cost_model.block_size
        self._num_blocks = num_blocks
        self._ids = ids
        self._kv: dict[int, int] = {}
        """By block · block_size + offset."""
        self._chains: dict[RequestId, list[int]] = {}

    def clear(self) -> None:
        """Forget everything, for a new session."""
        self._kv.clear()
        self._chains.clear()

    def admitted(self, orders: SchedulerOutput, shard: SimulatedShard) -> None:
        """Check applied orders: cached tokens are present, and no sequence writes to a block that another one holds."""
        starts = {admission.slot: admission.cached_tokens for admission in orders.placements}
        readers: dict[int, int] = {}
        held = shard.held
        for sequence in held:
            for block in sequence.blocks:
                if not 0 <= block < self._num_blocks:
                    raise RuleViolation(f"block {block} is not below {self._num_blocks}")
                readers[block] = readers.get(block, 0) + 1
            if len(set(sequence.blocks)) != len(sequence.blocks):
                raise RuleViolation(f"slot {sequence.slot} holds a block twice")
        for sequence in held:
            writes_from = self._computed(sequence) // self._block_size
            for block in sequence.blocks[writes_from:]:
                if readers[block] > 1:
                    raise RuleViolation(f"slot {sequence.slot} writes block {block}, which another sequence holds")
        for sequence in held:
            if sequence.slot in starts:
                chain = self._chain(sequence)
                for position in range(starts[sequence.slot]):
                    if self._kv.get(self._index(sequence, position)) != chain[position]:
                        raise RuleViolation(f"slot {sequence.slot} has the KV of another prefix at position {position}")

    def stepped(self, span: StepSpan, steps: int) -> None:
        """Write every position that the first `steps` steps of a span compute."""
        for sequence, chunk in span.chunks:
            self._write(sequence, sequence.computed, sequence.computed + chunk)
        for sequence in span.decoding:
            computed = self._computed(sequence)
            self._write(sequence, computed, computed + steps)

    def copied(self, copies: Sequence[Copy], host: HostContents) -> None:
        """Copy the contents of blocks as copies that ended did."""
        for copy in copies:
            for device, block in zip(copy.groups[0].device, copy.groups[0].host, strict=True):
                places = range(device * self._block_size, (device + 1) * self._block_size)
                if copy.is_load:
                    self._kv.update(zip(places, host[block], strict=True))
                else:
                    host[block] = [self._kv[place] for place in places]

    def _write(self, sequence: SimSequence, start: int, end: int) -> None:
        if end > len(sequence.blocks) * self._block_size:
            raise RuleViolation(f"slot {sequence.slot} runs past its blocks")
        chain = self._chain(sequence)
        for position in range(start, end):
            self._kv[self._index(sequence, position)] = chain[position]

    def _computed(self, sequence: SimSequence) -> int:
        prefilling = sequence.computed < sequence.prompt_length
        return sequence.computed if prefilling else sequence.at + sequence.shift - 1

    def _index(self, sequence: SimSequence, position: int) -> int:
        size = self._block_size
        return sequence.blocks[position // size] * size + position % size

    def _chain(self, sequence: SimSequence) -> list[int]:
        """Return the hash of each prefix of a request's whole text."""
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

    def forget(self, finished: Collection[int], span: StepSpan) -> None:
        """Forget the finished sequences of a span, given by slot."""
        for sequence in (*span.decoding, *(sequence for sequence, _ in span.chunks)):
            if sequence.slot in finished:
                self._chains.pop(sequence.request_id, None)


class SimulatedReplica:
    """State of one replica; only the simulator changes it."""

    __slots__ = (
        "acknowledged",
        "arrivals",
        "at_boundary",
        "audit",
        "deciding",
        "end_at",
        "holds",
        "index",
        "is_open",
        "orders",
        "orders_at",
        "session",
        "shard",
        "step_seconds",
        "version",
    )

    def __init__(self, index: int, shard: SimulatedShard, audit: KvAudit | None) -> None:
        self.index = index
        self.shard = shard
        self.audit = audit
        self.is_open = False
        self.session = 0
        self.reset()

    def reset(self) -> None:
        """Start a new session: no sequences, no orders in flight."""
        self.session += 1
        self.shard.clear()
        if self.audit is not None:
            self.audit.clear()
        self.orders: SchedulerOutput | None = None
        self.orders_at = 0.0
        self.arrivals: dict[RequestId, Arrival] = {}
        self.acknowledged = 0
        """Number of the last orders that the scheduler knows to be applied."""
        self.deciding = False
        """True while a decision is delayed."""
        self.holds = 0
        self.at_boundary = False
        self.end_at = -1.0
        self.version = 0
        """Version of the event that ends the span; older versions are ignored."""
        self.step_seconds = (0.0, 0.0)

    def end_copies(self, now: float, host: HostContents) -> list[CopyEnd]:
        """Return the copies that have ended since the last call."""
        copied = self.shard.copied(now)
        if self.audit is not None:
            self.audit.copied(copied, host)
        return [CopyEnd(copy.number) for copy in copied]
