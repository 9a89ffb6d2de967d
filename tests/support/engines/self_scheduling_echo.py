"""The echo engine as one that schedules for itself: a stand-in for TensorRT-LLM's executor, without a model.

It gets whole prompts only. It has a queue, batches in flight, prefills in order and in chunks, and owns its KV blocks: a sequence
starts when there are enough for its prompt and all its new tokens. It drives the step-scheduled echo engine as a router would, so
both generate the same tokens, and the step-scheduled engine checks this one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Self

from checked_echo import CheckedEcho

from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.values import FailureCode, WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import (
    EngineInfo,
    Failure,
    NewSequence,
    Orders,
    PromptScores,
    Scheduling,
    StepResult,
    SynchronousEngine,
    TopTokens,
)
from text_generation_shard.grammar import Grammars
from text_generation_shard.sequence_checks import NO_BLOCKS, meant_for_steps, sequence_problem


@dataclass(slots=True, eq=False)
class _Sequence:
    """A sequence, queued or running."""

    new: NewSequence
    to_prefill: int
    """Prompt tokens not ordered yet."""
    blocks: list[int] = field(default_factory=list)


class SelfSchedulingEcho(SynchronousEngine):
    """The echo engine with its own queue and KV blocks."""

    def __init__(self, engine: CheckedEcho, tokens_per_report: int) -> None:
        self._engine = engine
        self._info = replace(engine.info, scheduling=Scheduling.SELF, scores_generated=False)
        self._coalescer = _Coalescer(tokens_per_report)
        self._num_blocks = 0
        self._max_running = 0
        self._prefill_budget = 0
        self._held: dict[int, _Sequence] = {}
        """By slot; queued and running."""
        self._queue: deque[_Sequence] = deque()
        self._running: dict[int, _Sequence] = {}
        """By slot."""
        self._free: list[int] = []
        self._release: list[int] = []
        """Slots to release with the next orders to the step engine."""

    @classmethod
    def build(cls, config: ShardConfig, tokens_per_report: int = 1, **faults: int) -> Self:
        return cls(CheckedEcho.build(config, **faults), tokens_per_report)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def grammars(self) -> Grammars | None:
        return self._engine.grammars

    def warm_up(self, limits: WarmUpLimits) -> tuple[CacheGroup, ...]:
        groups = self._engine.warm_up(limits)
        self._num_blocks = groups[0].num_blocks
        self._max_running = min(limits.max_batch_size or self._info.max_slots, self._info.max_slots)
        self._prefill_budget = limits.max_batch_prefill_tokens or self._info.suggested_prefill_tokens
        self.reset()
        return groups

    def apply(self, orders: Orders) -> list[Failure]:
        failed: list[Failure] = []
        for slot in orders.release:
            self._drop(slot)
        for new in orders.placements:
            if problem := self._new_sequence_problem(new):
                failed.append(self._refuse(new.slot, problem))
            else:
                held = self._held[new.slot] = _Sequence(new, len(new.prompt))
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

    @property
    def prefilling(self) -> int:
        return self._engine.prefilling

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

    def _decide(self) -> Orders:
        placements = self._take_from_queue()
        release, self._release = tuple(self._release), []
        return Orders(0, release, tuple(placements), prefill=tuple(self._chunks()))

    def _take_from_queue(self) -> list[NewSequence]:
        """Admit sequences from the head of the queue, in order, while there is room."""
        placements: list[NewSequence] = []
        while self._queue and len(self._running) < self._max_running:
            held = self._queue[0]
            if (count := self._blocks_for(held.new)) > len(self._free):
                break
            self._queue.popleft()
            held.blocks = [self._free.pop() for _ in range(count)]
            self._running[held.new.slot] = held
            placements.append(replace(held.new, blocks=tuple(held.blocks)))
        return placements

    def _chunks(self) -> list[tuple[int, int]]:
        chunks: list[tuple[int, int]] = []
        budget = self._prefill_budget
        for slot, held in self._running.items():
            if tokens := min(held.to_prefill, budget):
                held.to_prefill -= tokens
                budget -= tokens
                chunks.append((slot, tokens))
        return chunks

    def _record(self, result: StepResult) -> None:
        for slot in (*(slot for slot, _ in result.finished), *(failure.slot for failure in result.failed)):
            self._free += self._running.pop(slot).blocks
            del self._held[slot]

    def _drop(self, slot: int) -> None:
        """Drop the sequence in `slot`; no-op if there is none."""
        if (held := self._held.pop(slot, None)) is None:
            return
        self._coalescer.drop(slot)
        if self._running.pop(slot, None) is not None:
            self._release.append(slot)
            self._free += held.blocks
        else:
            self._queue.remove(held)
            _cancel_matcher(held)

    def _refuse(self, slot: int, problem: str) -> Failure:
        self._drop(slot)
        return Failure(slot, FailureCode.INVALID, problem)

    def _new_sequence_problem(self, new: NewSequence) -> str | None:
        if new.slot in self._held:
            return f"slot {new.slot} is taken"
        if new.blocks or new.computed_tokens:
            return NO_BLOCKS
        if problem := sequence_problem(new, self._info):
            return problem
        if self._blocks_for(new) > self._num_blocks:
            pool = self._num_blocks * self._info.block_size
            return f"prompt and new tokens exceed the engine's KV pool of {pool} tokens"
        return None

    def _blocks_for(self, new: NewSequence) -> int:
        return -(-(len(new.prompt) + new.stopping.max_new_tokens - 1) // self._info.block_size)


def _cancel_matcher(held: _Sequence) -> None:
    if held.new.matcher is not None:
        held.new.matcher.cancel()


class _Coalescer:
    """Holds tokens back for `tokens_per_report` steps, or until a sequence ends."""

    def __init__(self, tokens_per_report: int) -> None:
        self._tokens_per_report = tokens_per_report
        self.clear()

    def clear(self) -> None:
        """Discard all tokens."""
        self._steps = 0
        self._tokens: dict[int, list[tuple[int, float]]] = {}
        """By slot: token ids and log-probabilities."""
        self._tops: list[TopTokens] = []
        self._scores: list[PromptScores] = []

    def add(self, result: StepResult) -> StepResult:
        """Add the result of a step, at most one token per slot. Return the result to report."""
        if self._tokens_per_report == 1:
            return result
        self._steps += bool(result.slots)
        for slot, token_id, logprob in zip(result.slots, result.token_ids, result.logprobs, strict=True):
            self._tokens.setdefault(slot, []).append((token_id, logprob))
        self._tops += [replace(top, index=len(self._tokens[top.slot]) - 1) for top in result.top_tokens]
        self._scores += result.prompt_logprobs
        is_due = self._steps == self._tokens_per_report or result.finished or result.failed
        report = (self.rest() if is_due else None) or StepResult()
        report.prefilled, report.finished, report.failed = result.prefilled, result.finished, result.failed
        report.forward_ns = result.forward_ns
        return report

    def rest(self) -> StepResult | None:
        """Return all tokens held back; None if there are none."""
        if not self._tokens:
            return None
        report = StepResult(top_tokens=self._tops, prompt_logprobs=self._scores)
        for slot, tokens in self._tokens.items():
            report.slots.append(slot)
            report.token_counts.append(len(tokens))
            report.token_ids += [token_id for token_id, _ in tokens]
            report.logprobs += [logprob for _, logprob in tokens]
        self.clear()
        return report

    def drop(self, slot: int) -> None:
        """Discard the tokens of a sequence."""
        self._tokens.pop(slot, None)
        self._tops = [top for top in self._tops if top.slot != slot]
        self._scores = [scores for scores in self._scores if scores.slot != slot]
