"""The echo engine as one that schedules for itself: a stand-in for TensorRT-LLM's executor, without a model.

It gets whole prompts only. It has a queue, batches in flight, prefills in order and in chunks, and owns its KV blocks: when they
run out it preempts the newest sequence and computes it again later. It drives the step-scheduled echo engine as a router would,
so both generate the same tokens, and the step-scheduled engine checks this one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Self

from checked_echo import CheckedEcho

from text_generation_proto.values import FailureCode, LogprobOptions, WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import (
    NO_BLOCKS,
    EngineInfo,
    Failure,
    NewSequence,
    Orders,
    PromptScores,
    Scheduling,
    StepResult,
    SynchronousEngine,
    TopTokens,
    meant_for_steps,
    sequence_problem,
)
from text_generation_shard.grammar import Grammars, Matcher


@dataclass(slots=True, eq=False)
class _Sequence:
    """A sequence, queued or running."""

    new: NewSequence
    """Includes in its prompt the tokens generated before a preemption."""
    blocks: list[int] = field(default_factory=list)
    to_prefill: int = 0
    """Prompt tokens not ordered yet."""
    tokens: list[int] = field(default_factory=list)
    """Tokens generated since it was last admitted to the step engine."""

    @property
    def length(self) -> int:
        return len(self.new.prompt) + len(self.tokens)

    @property
    def matcher(self) -> Future[Matcher] | None:
        return self.new.matcher


class SelfSchedulingEcho(SynchronousEngine):
    """The echo engine with its own queue and KV blocks."""

    def __init__(self, engine: CheckedEcho, tokens_per_report: int) -> None:
        self._engine = engine
        self._info = replace(engine.info, scheduling=Scheduling.SELF)
        self._coalescer = _Coalescer(tokens_per_report)
        self._num_blocks = 0
        self._max_running = 0
        self._prefill_budget = 0
        self._held: dict[int, _Sequence] = {}
        """By slot; queued and running."""
        self._queue: deque[_Sequence] = deque()
        self._running: dict[int, _Sequence] = {}
        """By slot; the newest last."""
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
        for new in orders.placements:
            if problem := self._new_sequence_problem(new):
                failed.append(self._refuse(new.slot, problem))
            else:
                held = self._held[new.slot] = _Sequence(new)
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
        allocations = self._grow()
        placements = self._take_from_queue()
        prefill = self._chunks()
        release, self._release = tuple(self._release), []
        return Orders(0, release, tuple(placements), tuple(allocations.items()), tuple(prefill))

    def _grow(self) -> dict[int, tuple[int, ...]]:
        """Allocate a block to each sequence that needs one for its next token; preempt the newest if none is free."""
        allocations: dict[int, tuple[int, ...]] = {}
        for slot, held in list(self._running.items()):
            while slot in self._running and len(held.blocks) < self._blocks_for(held.length):
                if self._free:
                    held.blocks.append(self._free.pop())
                    allocations[slot] = (*allocations.get(slot, ()), held.blocks[-1])
                else:
                    self._preempt(self._newest())
        # A sequence may be preempted after it got a block.
        return {slot: blocks for slot, blocks in allocations.items() if slot in self._running}

    def _take_from_queue(self) -> list[NewSequence]:
        """Admit sequences from the head of the queue, in order, while there is room."""
        placements: list[NewSequence] = []
        while self._queue and len(self._running) < self._max_running:
            held = self._queue[0]
            # Include the first new token, or a preempted sequence may be preempted again at once.
            tokens = held.length + min(1, held.new.stopping.max_new_tokens - 1)
            if (count := self._blocks_for(tokens)) > len(self._free):
                break
            self._queue.popleft()
            held.blocks = [self._free.pop() for _ in range(count)]
            held.to_prefill = held.length
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

    def _newest(self) -> _Sequence:
        """Return the newest running sequence whose grammar is built: a release would cancel a build in progress.

        There always is one: a sequence that needs a block has generated a token, so its own grammar is built.
        """
        return next(held for held in reversed(self._running.values()) if held.matcher is None or held.matcher.done())

    def _preempt(self, held: _Sequence) -> None:
        """Move a sequence back to the head of the queue; its new tokens become part of its prompt."""
        self._stop(held)
        if count := len(held.tokens):
            new, stopping = held.new, held.new.stopping
            held.new = replace(
                new,
                prompt=(*new.prompt, *held.tokens),
                generated_tokens=new.generated_tokens + count,
                stopping=replace(
                    stopping,
                    max_new_tokens=stopping.max_new_tokens - count,
                    min_new_tokens=max(0, stopping.min_new_tokens - count),
                ),
                # The log-probabilities of the prompt came with the first token.
                logprobs=LogprobOptions(new.logprobs.top_n),
            )
            held.tokens = []
        self._queue.appendleft(held)

    def _record(self, result: StepResult) -> None:
        for slot, token_id in zip(result.slots, result.token_ids, strict=True):
            self._running[slot].tokens.append(token_id)
        for slot in (*(slot for slot, _ in result.finished), *(failure.slot for failure in result.failed)):
            self._free_blocks(self._running.pop(slot))
            del self._held[slot]

    def _drop(self, slot: int) -> None:
        """Drop the sequence in `slot`; no-op if there is none."""
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

    def _stop(self, held: _Sequence) -> None:
        del self._running[held.new.slot]
        self._release.append(held.new.slot)
        self._free_blocks(held)

    def _free_blocks(self, held: _Sequence) -> None:
        self._free += held.blocks
        held.blocks = []

    def _new_sequence_problem(self, new: NewSequence) -> str | None:
        if new.slot in self._held:
            return f"slot {new.slot} is taken"
        if new.blocks or new.computed_tokens:
            return NO_BLOCKS
        if problem := sequence_problem(new, self._info):
            return problem
        longest = len(new.prompt) + new.stopping.max_new_tokens - 1
        if self._blocks_for(longest) > self._num_blocks:
            pool = self._num_blocks * self._info.block_size
            return f"prompt and new tokens exceed the engine's KV pool of {pool} tokens"
        return None

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._info.block_size)


def _cancel_matcher(held: _Sequence) -> None:
    if held.matcher is not None:
        held.matcher.cancel()


@dataclass(slots=True)
class _Unreported:
    """Tokens of a sequence that are not reported yet."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_tokens: list[TopTokens] = field(default_factory=list)
    prompt_logprobs: list[PromptScores] = field(default_factory=list)


class _Coalescer:
    """Holds the tokens of each sequence back until there are `tokens_per_report`, or the sequence ends."""

    def __init__(self, tokens_per_report: int) -> None:
        self._tokens_per_report = tokens_per_report
        self._unreported: dict[int, _Unreported] = {}

    def add(self, result: StepResult) -> StepResult:
        """Add the result of a step, at most one token per slot. Return the result to report."""
        if self._tokens_per_report == 1:
            return result
        for slot, token_id, logprob in zip(result.slots, result.token_ids, result.logprobs, strict=True):
            unreported = self._unreported.setdefault(slot, _Unreported())
            unreported.token_ids.append(token_id)
            unreported.logprobs.append(logprob)
        for top in result.top_tokens:
            unreported = self._unreported[top.slot]
            unreported.top_tokens.append(replace(top, index=len(unreported.token_ids) - 1))
        for scores in result.prompt_logprobs:
            self._unreported[scores.slot].prompt_logprobs.append(scores)
        ended = [slot for slot, _ in result.finished] + [failure.slot for failure in result.failed]
        complete = [slot for slot in result.slots if len(self._unreported[slot].token_ids) >= self._tokens_per_report]
        report = StepResult(
            prefilled=result.prefilled, finished=result.finished, failed=result.failed, forward_ns=result.forward_ns
        )
        self._release((*complete, *ended), report)
        return report

    def rest(self) -> StepResult | None:
        """Return all unreported tokens, for when no step follows; None if there are none."""
        if not self._unreported:
            return None
        report = StepResult()
        self._release(list(self._unreported), report)
        return report

    def drop(self, slot: int) -> None:
        """Discard the tokens of a sequence."""
        self._unreported.pop(slot, None)

    def clear(self) -> None:
        """Discard all tokens."""
        self._unreported.clear()

    def _release(self, slots: Iterable[int], report: StepResult) -> None:
        for slot in slots:
            if unreported := self._unreported.pop(slot, None):
                report.slots.append(slot)
                report.token_counts.append(len(unreported.token_ids))
                report.token_ids += unreported.token_ids
                report.logprobs += unreported.logprobs
                report.top_tokens += unreported.top_tokens
                report.prompt_logprobs += unreported.prompt_logprobs
