"""Who runs in an iteration: a waiting queue, the active requests, and their place in the KV cache.

As py_executor.py near 1.2.1 does it: what was submitted is fetched into `waiting`; up to `max_batch_size` sequences are
active; of these, in order, those run whose whole prompt and answer fit in the KV cache (GUARANTEED_NO_EVICT), as far as
the iteration's token budget goes.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from trtllm_standin.pool import BlockPool, PrefixCache
from trtllm_standin.sequences import Request, Sequence


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine was built for."""

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    max_beam_width: int
    chunked_prefill: bool
    vocab_size: int
    num_blocks: int
    block_size: int
    stream_interval: int
    reuses_blocks: bool
    by_priority: bool


@dataclass(slots=True)
class Batch:
    """One iteration's work."""

    sampling: list[Sequence] = field(default_factory=list)
    """Those that get tokens: all but prompts that go on in the next iteration."""
    context_sequences: int = 0
    context_tokens: int = 0
    generation_sequences: int = 0

    def __bool__(self) -> bool:
        return bool(self.context_sequences or self.generation_sequences)


class WaitingQueue:
    """Requests that were fetched and are not active: first come first, or by priority (main, PR #12362)."""

    def __init__(self, *, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._fifo: deque[Request] = deque()
        self._heap: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._fifo) + len(self._heap)

    def push(self, request: Request) -> None:
        """Add a request."""
        if self._by_priority:
            heapq.heappush(self._heap, (-request.priority, request.id, request))
        else:
            self._fifo.append(request)

    def pop(self) -> Request:
        """The next one."""
        return heapq.heappop(self._heap)[2] if self._by_priority else self._fifo.popleft()

    def drop(self, request: Request) -> bool:
        """Take one out; whether it was there."""
        if self._by_priority:
            before = len(self._heap)
            self._heap = [entry for entry in self._heap if entry[2] is not request]
            heapq.heapify(self._heap)
            return len(self._heap) < before
        try:
            self._fifo.remove(request)
        except ValueError:
            return False
        return True


class Scheduler:
    """Requests, from the fetch to their end. Used by the engine's thread only."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks, limits.block_size)
        self.cache = PrefixCache(limits.num_blocks, limits.block_size)
        self.waiting = WaitingQueue(by_priority=limits.by_priority)
        self.active: list[Sequence] = []

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.active and not len(self.waiting)

    def activate(self) -> list[tuple[Request, str]]:
        """Let in what waits, as far as there are places. Returns those that are refused, and why."""
        refused = []
        while len(self.waiting) and len(self.active) < self.limits.max_batch_size:
            request = self.waiting.pop()
            if problem := self._problem(request):
                refused.append((request, problem))
            else:
                self.active += request.sequences
        return refused

    def schedule(self) -> Batch:
        """Choose who runs, and give those who start their blocks."""
        batch = Batch([sequence for sequence in self.active if sequence.is_generating])
        batch.generation_sequences = len(batch.sampling)
        if batch.generation_sequences == len(self.active):
            return batch
        budget = self.limits.max_num_tokens - batch.generation_sequences
        for sequence in self.active:
            if sequence.is_generating:
                continue
            if not self._start(sequence):
                break  # The capacity scheduler stops at the first that does not fit.
            chunk = self._chunk(sequence, budget)
            if chunk <= 0:
                break
            budget -= chunk
            sequence.prefilled += chunk
            batch.context_sequences += 1
            batch.context_tokens += chunk
            if sequence.prefilled == len(sequence.request.prompt):
                self._finish_prefill(sequence)
                batch.sampling.append(sequence)
        return batch

    def end(self, ended: list[Sequence]) -> None:
        """Forget sequences, and what they held."""
        for sequence in ended:
            if sequence.is_started:
                self.pool.release(sequence.blocks)
                sequence.is_started = False
                if self.limits.reuses_blocks and sequence.is_generating:
                    self.cache.store([*sequence.request.prompt, *sequence.generated], sequence.request.salt)
        gone = set(map(id, ended))
        self.active = [sequence for sequence in self.active if id(sequence) not in gone]

    def _problem(self, request: Request) -> str | None:
        """py_executor.py, _validate_request: why a request is refused when it becomes active."""
        limits = self.limits
        if request.beam_width != limits.max_beam_width:
            return (
                f"Request beam width {request.beam_width} is not equal to max_beam_width {limits.max_beam_width}. "
                "This is not supported!"
            )
        if min(request.prompt) < 0 or max(request.prompt) >= limits.vocab_size:
            return "Token ID out of range"
        return None

    def _start(self, sequence: Sequence) -> bool:
        if sequence.is_started:
            return True
        request = sequence.request
        blocks = self.pool.needed(len(request.prompt) + request.limit)
        if not self.pool.reserve(blocks):
            return False
        sequence.blocks = blocks
        sequence.is_started = True
        if self.limits.reuses_blocks:
            sequence.cached = sequence.prefilled = self.cache.match(request.prompt, request.salt)
        return True

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Prompt tokens to compute now: all that is left, or with chunked prefill as many whole blocks as fit."""
        left = len(sequence.request.prompt) - sequence.prefilled
        if left <= budget:
            return left
        return budget // self.limits.block_size * self.limits.block_size if self.limits.chunked_prefill else 0

    def _finish_prefill(self, sequence: Sequence) -> None:
        sequence.is_generating = True
        sequence.score_prompt()
        if self.limits.reuses_blocks:
            self.cache.store(sequence.request.prompt, sequence.request.salt)
