"""The echo engine as one that schedules for itself: what TensorRT-LLM's executor is to a router, with no model.

It gets whole prompts and nothing more. It has a queue, batches in flight, computes prompts in order and in chunks, and owns
its KV blocks: when they run out it preempts the newest sequence and computes it again later. Underneath runs the step engine,
and this one steers it as a router would; so both say the same tokens, and the step engine checks what this one does.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from text_generation_proto.values import FailureCode, LogprobOptions
from text_generation_shard.checks import NO_BLOCKS, admission_problem, meant_for_steps
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import (
    EngineInfo,
    Failure,
    InProcess,
    NewSequence,
    Orders,
    Scheduling,
    StepResult,
    WarmUpLimits,
)
from text_generation_shard.engines.coalesce import Coalescer
from text_generation_shard.engines.echo import EchoEngine
from text_generation_shard.grammar import Grammars, Matcher


@dataclass(slots=True, eq=False)
class _Held:
    """A sequence, queued or running."""

    admission: NewSequence
    """As it would be admitted now: what it generated before it was preempted is part of its prompt."""
    blocks: list[int] = field(default_factory=list)
    to_prefill: int = 0
    """Prompt tokens that no chunk was ordered for."""
    tokens: list[int] = field(default_factory=list)
    """Generated since it was last admitted."""

    @property
    def length(self) -> int:
        return len(self.admission.prompt) + len(self.tokens)

    @property
    def matcher(self) -> Future[Matcher] | None:
        return self.admission.matcher


class SelfSchedulingEcho(InProcess):
    """See the module."""

    def __init__(self, engine: EchoEngine, tokens_per_report: int) -> None:
        self._engine = engine
        self._info = replace(engine.info, scheduling=Scheduling.SELF)
        self._coalescer = Coalescer(tokens_per_report)
        self._num_blocks = 0
        self._max_running = 0
        self._prefill_budget = 0
        self._held: dict[int, _Held] = {}
        """By slot, queued and running."""
        self._queue: deque[_Held] = deque()
        self._running: dict[int, _Held] = {}
        """By slot, the newest last."""
        self._free: list[int] = []
        self._release: list[int] = []
        """Slots that the step engine is to drop."""

    @classmethod
    def build(cls, config: ShardConfig) -> SelfSchedulingEcho:
        return cls(EchoEngine.build(config), config.echo_tokens_per_report)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def grammars(self) -> Grammars | None:
        return self._engine.grammars

    def warm_up(self, limits: WarmUpLimits) -> int:
        self._num_blocks = self._engine.warm_up(limits)
        self._max_running = min(limits.max_batch_size or self._info.max_slots, self._info.max_slots)
        self._prefill_budget = limits.max_batch_prefill_tokens or self._info.suggested_prefill_tokens
        self.reset()
        return self._num_blocks

    def apply(self, orders: Orders) -> list[Failure]:
        failed: list[Failure] = []
        for slot in orders.release:
            self._drop(slot)
        for admission in orders.admit:
            if problem := self._admission_problem(admission):
                failed.append(self._refuse(admission.slot, problem))
            else:
                held = self._held[admission.slot] = _Held(admission)
                self._queue.append(held)
        failed += [self._refuse(slot, problem) for slot, problem in meant_for_steps(orders) if slot in self._held]
        return failed

    def step(self) -> StepResult | None:
        failed = self._engine.apply(self._decide())
        result = self._engine.step()
        if result is None and not failed:
            return self._coalescer.rest()
        result = result or StepResult()
        result.failed += failed
        self._record(result)
        return self._coalescer.add(result)

    @property
    def running(self) -> int:
        return len(self._held)

    @property
    def used_blocks(self) -> int:
        return self._num_blocks - len(self._free)

    @property
    def queued(self) -> int:
        return len(self._queue)

    def reset(self) -> None:
        for held in self._queue:
            _cancel_matcher(held)
        self._held.clear()
        self._queue.clear()
        self._running.clear()
        self._release.clear()
        self._free = list(range(self._num_blocks))
        self._coalescer.clear()
        self._engine.reset()

    def close(self) -> None:
        self.reset()
        self._engine.close()

    # ---------------------------------------------------------------------------------------------- one step's orders

    def _decide(self) -> Orders:
        grants = self._grow()
        admit = self._take_from_queue()
        prefill = self._chunks()
        release, self._release = tuple(self._release), []
        return Orders(0, release, tuple(admit), tuple(grants.items()), tuple(prefill))

    def _grow(self) -> dict[int, tuple[int, ...]]:
        """A block for each sequence whose next token has none; the newest give theirs up when there is none left."""
        grants: dict[int, tuple[int, ...]] = {}
        for slot, held in list(self._running.items()):
            while slot in self._running and len(held.blocks) < self._blocks_for(held.length):
                if self._free:
                    held.blocks.append(self._free.pop())
                    grants[slot] = (*grants.get(slot, ()), held.blocks[-1])
                else:
                    self._preempt(self._newest())
        # Whoever was preempted after it was granted a block has lost it again.
        return {slot: blocks for slot, blocks in grants.items() if slot in self._running}

    def _take_from_queue(self) -> list[NewSequence]:
        """Those at the head of the queue, in order, as long as there is room."""
        admit: list[NewSequence] = []
        while self._queue and len(self._running) < self._max_running:
            held = self._queue[0]
            # Room for the first new token too, or one that was preempted might come back only to go again.
            tokens = held.length + min(1, held.admission.stopping.max_new_tokens - 1)
            if (count := self._blocks_for(tokens)) > len(self._free):
                break
            self._queue.popleft()
            held.blocks = [self._free.pop() for _ in range(count)]
            held.to_prefill = held.length
            self._running[held.admission.slot] = held
            admit.append(replace(held.admission, blocks=tuple(held.blocks)))
        return admit

    def _chunks(self) -> list[tuple[int, int]]:
        chunks: list[tuple[int, int]] = []
        budget = self._prefill_budget
        for slot, held in self._running.items():
            if tokens := min(held.to_prefill, budget):
                held.to_prefill -= tokens
                budget -= tokens
                chunks.append((slot, tokens))
        return chunks

    def _newest(self) -> _Held:
        """The last that came and can go: a grammar that is being built would be cancelled with its sequence.

        Whoever needs a block has said something, so its own grammar is there: one is always found.
        """
        return next(held for held in reversed(self._running.values()) if held.matcher is None or held.matcher.done())

    def _preempt(self, held: _Held) -> None:
        """Back to the head of the queue, with what it generated as part of its prompt."""
        self._stop(held)
        if new := len(held.tokens):
            admission, stopping = held.admission, held.admission.stopping
            held.admission = replace(
                admission,
                prompt=(*admission.prompt, *held.tokens),
                generated_tokens=admission.generated_tokens + new,
                stopping=replace(
                    stopping,
                    max_new_tokens=stopping.max_new_tokens - new,
                    min_new_tokens=max(0, stopping.min_new_tokens - new),
                ),
                # The prompt's came with the first token.
                logprobs=LogprobOptions(admission.logprobs.top_n),
            )
            held.tokens = []
        self._queue.appendleft(held)

    def _record(self, result: StepResult) -> None:
        for slot, token_id in zip(result.slots, result.token_ids, strict=True):
            self._running[slot].tokens.append(token_id)
        for slot in (*(slot for slot, _ in result.finished), *(failure.slot for failure in result.failed)):
            self._give_back(self._running.pop(slot))
            del self._held[slot]

    # ------------------------------------------------------------------------------------------------------- sequences

    def _drop(self, slot: int) -> None:
        """Forget the sequence in `slot`, if there is one."""
        if (held := self._held.pop(slot, None)) is None:
            return
        self._coalescer.drop(slot)
        if slot in self._running:
            self._stop(held)
        else:
            self._queue.remove(held)
            _cancel_matcher(held)

    def _refuse(self, slot: int, problem: str) -> Failure:
        self._drop(slot)
        return Failure(slot, FailureCode.INVALID, problem)

    def _stop(self, held: _Held) -> None:
        del self._running[held.admission.slot]
        self._release.append(held.admission.slot)
        self._give_back(held)

    def _give_back(self, held: _Held) -> None:
        self._free += held.blocks
        held.blocks = []

    def _admission_problem(self, admission: NewSequence) -> str | None:
        if admission.slot in self._held:
            return f"slot {admission.slot} is taken"
        if admission.blocks or admission.computed_tokens:
            return NO_BLOCKS
        if problem := admission_problem(admission, self._info):
            return problem
        longest = len(admission.prompt) + admission.stopping.max_new_tokens - 1
        if self._blocks_for(longest) > self._num_blocks:
            pool = self._num_blocks * self._info.block_size
            return f"prompt and new tokens exceed the engine's KV pool of {pool} tokens"
        return None

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._info.block_size)


def _cancel_matcher(held: _Held) -> None:
    if held.matcher is not None:
        held.matcher.cancel()
