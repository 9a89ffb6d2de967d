"""The engine's loop in its own thread: fetch, schedule, compute, answer. Near 1.2.1: py_executor.py.

Submitted requests wait; up to `max_batch_size` are active; of these, in order, those run whose whole prompt and output fit in the KV
cache (GUARANTEED_NO_EVICT), within the token budget of the iteration.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from trtllm_standin.inspection import Recorder
from trtllm_standin.ranks import Rank, start, take
from trtllm_standin.release import Release
from trtllm_standin.results import ErrorResponse, FinishReason, RequestOutput
from trtllm_standin.sequences import RequestFault, Sequence, StepFault
from trtllm_standin.settings import Fault, Settings
from trtllm_standin.speculation import Speculation

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of an engine."""

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    vocab_size: int
    windows: Mapping[int, int]
    """Attention window → KV blocks on the GPU of one attention data parallel rank; the statistics are those of the first rank."""
    block_size: int
    host_blocks: int = 0
    """KV blocks in host memory, of each window."""
    ranks: int = 1
    """Attention data parallel ranks: each has its own batch and KV cache."""
    reuses_blocks: bool = True

    @property
    def max_num_blocks(self) -> int:
        """The figure that the library calls so: all windows, host memory too (kvCacheManager.h, BlockManager::getMaxNumBlocks)."""
        return sum(self.windows.values()) + self.host_blocks * len(self.windows)


class Engine:
    """Runs sequences. `submit`, `cancel`, `stop` and `freeze` may be called from any thread."""

    def __init__(
        self,
        limits: Limits,
        settings: Settings,
        recorder: Recorder,
        release: Release,
        speculation: Speculation | None = None,
        *,
        compiled: bool = False,
    ) -> None:
        self.limits = limits
        self._release = release
        self._speculation = speculation
        self._compiled = compiled
        self._is_mute = False
        """The thread that delivers responses has ended."""
        self._drafted = self._accepted = self._drafting = 0
        """Tokens of this iteration: drafted, accepted; and sequences that drafted."""
        self.ranks = [Rank(limits) for _ in range(limits.ranks)]
        self.waiting: deque[Sequence] = deque()
        self.statistics: deque[dict[str, Any]] = deque(maxlen=1000)
        """The entries that have not been read. An idle engine adds none, so the last entry describes a busy iteration."""
        self._settings = settings
        self._recorder = recorder
        self._cancels_with_token = settings.cancel_with_token and release.lacks_cancelled_logprobs
        self._inbox: SimpleQueue[Sequence | int | None] = SimpleQueue()
        """New sequences, ids of cancelled requests, None to stop."""
        self._cancelled: set[int] = set()
        self._items: list[tuple[RequestOutput, Any]] = []
        """The items of this iteration."""
        self._loop: asyncio.AbstractEventLoop
        self._iteration = 0
        self._is_stopping = False
        self._is_frozen = False
        self._thread = threading.Thread(target=self._run, name="trtllm-standin", daemon=True)

    def start(self, ended: Callable[[int], None], died: Callable[[Exception], None]) -> None:
        """Start the loop, whose thread calls `ended` for a request that got its last item, `died` if the engine died."""
        self._ended, self._died = ended, died
        self._thread.start()

    def submit(self, sequence: Sequence) -> None:
        """Add a sequence. Called on the event loop of its reader."""
        # proxy.py assumes that all loops of a process are the same.
        self._loop = asyncio.get_running_loop()
        self._inbox.put(sequence)

    def cancel(self, request_id: int) -> None:
        """Cancel a request; no-op if unknown."""
        self._inbox.put(request_id)

    def stop(self) -> None:
        """End the loop once nothing is left to do."""
        self._inbox.put(None)

    def join(self) -> None:
        """Wait for the end of the loop, without a limit."""
        self._thread.join()

    def freeze(self) -> None:
        """Produce nothing any more, as after the unnoticed death of a worker process."""
        self._is_frozen = True

    @property
    def active(self) -> list[Sequence]:
        return [sequence for rank in self.ranks for sequence in rank.active]

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not any(rank.active for rank in self.ranks)

    def _run(self) -> None:
        while self._iterate():
            self._hand_over()
        self._hand_over()

    def _iterate(self) -> bool:
        """Run one iteration; return False if it was the last."""
        self._fetch()
        if self._is_frozen:
            threading.Event().wait()
        if self.is_idle:
            return not self._is_stopping
        taken, most = take(self.waiting, self.ranks, self.limits.max_batch_size), self.limits.max_batch_size
        try:
            start(taken, self.ranks, most)
        except TypeError as error:
            self._died(error)
            return False
        started = time.perf_counter()
        scheduled = [self._schedule(rank) for rank in self.ranks]
        sampling = [sequence for part, _ in scheduled for sequence in part]
        context_tokens = max(tokens for _, tokens in scheduled)
        pace = (self._settings.step_ms + self._settings.prefill_us * context_tokens / 1e3) / 1e3
        time.sleep(max(started + pace - time.perf_counter(), 0.0))  # at least yield to other threads
        for sequence in sampling:
            try:
                if self._speculation is not None and self._speculation.one_model and sequence.top is not None:
                    raise StepFault(Fault.STEP, "assert not request.py_return_log_probs")
                response = sequence.step(self._tokens(sequence))
            except RequestFault as fault:
                self._fail(sequence, str(fault))
            except StepFault as fault:
                return self._fail_step(fault)
            else:
                response.drafted = sequence.drafted if self._settings.drafts_in_responses else None
                self._items.append((sequence.result, response))
                if response.finish is not None:
                    self._end(sequence, response.finish)
        if not self._handle_cancels():
            return False
        self._measure()
        return True

    def _tokens(self, sequence: Sequence) -> int:
        """Return the tokens of this step of a sequence, and count those that were drafted."""
        if self._speculation is None:
            return self._settings.tokens_per_step
        count = self._speculation.tokens(sequence.generated)
        if sequence.generated:
            self._drafting += 1
            self._drafted += self._speculation.draft_tokens
            self._accepted += count - 1
            accepted, drafted, drafts = sequence.drafted
            sequence.drafted = accepted + count - 1, drafted + self._speculation.draft_tokens, drafts + 1
        return count

    def _fetch(self) -> None:
        """Empty the inbox; if there is nothing else to do, wait for a message first."""
        wait = self.is_idle and not self._is_stopping
        while wait or not self._inbox.empty():
            message = self._inbox.get()
            wait = False
            if message is None:
                self._is_stopping = True
            elif isinstance(message, int):
                self._cancelled.add(message)
            else:
                self.waiting.append(message)

    def _schedule(self, rank: Rank) -> tuple[list[Sequence], int]:
        """Allocate the blocks of sequences that start on a rank. Return those that get tokens, and the prompt tokens to compute."""
        sampling = [sequence for sequence in rank.active if sequence.is_generating]
        budget = limit = self.limits.max_num_tokens - len(sampling)
        for sequence in rank.active:
            if sequence.is_generating:
                continue
            if not sequence.blocks:
                length, used = len(sequence.prompt) + sequence.limit, rank.used_blocks
                if self._speculation is not None:
                    # py_executor_creator.py, model_engine_max_seq_len: the drafts of this step and of the next one.
                    length += 2 * self._speculation.draft_tokens
                blocks = {window: -(-min(length, window) // self.limits.block_size) for window in used}
                if any(used[w] + blocks[w] > most for w, most in self.limits.windows.items()):
                    self._note_wait(sequence)
                    break  # the capacity scheduler stops at the first that does not fit
                for window in used:
                    used[window] += blocks[window]
                sequence.blocks = blocks
                if self.limits.reuses_blocks:
                    sequence.cached = sequence.prefilled = rank.prefixes.match(sequence.root, sequence.prompt)
            chunk = min(len(sequence.prompt) - sequence.prefilled, budget)
            budget -= chunk
            sequence.prefilled += chunk
            if sequence.is_generating:
                sampling.append(sequence)
                rank.prefixes.store(sequence.root, sequence.prompt)
        return sampling, limit - budget

    def _note_wait(self, sequence: Sequence) -> None:
        if not sequence.waited:
            sequence.waited = True
            self._recorder.write("wait", id=sequence.id)

    def _handle_cancels(self) -> bool:
        """Cancel after the step; a sequence that ended in it has ended by itself. Return False if the engine died.

        A request that is not active is dropped from the queue without an item, so its reader waits forever (py_executor.py,
        update_waiting_queue).
        """
        for sequence in [sequence for sequence in (*self.waiting, *self.active) if sequence.id in self._cancelled]:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
                self._recorder.write("end", id=sequence.id, reason="dropped", tokens=0)
            elif self._compiled and sequence.top is not None:
                self._died(
                    RuntimeError("the executor crashed at a cancelled request with log-probabilities")
                )  # issue #10810
                return False
            else:
                if self._release.asserts_scored_prompts and sequence.prompt_top is not None and not sequence.generated:
                    self._is_mute = True
                with_token = self._cancels_with_token and sequence.top is not None
                self._items.append((sequence.result, sequence.cancel(with_token=with_token)))
                self._end(sequence, FinishReason.CANCELLED)
        self._cancelled.clear()
        return True

    def _end(self, sequence: Sequence, finish: FinishReason | None) -> None:
        """Free the blocks of a sequence; `finish` is None after an error."""
        for window, blocks in sequence.blocks.items():
            sequence.rank.used_blocks[window] -= blocks
        sequence.rank.active.remove(sequence)
        self._ended(sequence.id)
        reason = "error" if finish is None else finish.value.partition(" ")[0]
        self._recorder.write("end", id=sequence.id, reason=reason, tokens=sequence.generated)

    def _fail(self, sequence: Sequence, message: str) -> None:
        """Deliver an error (_handle_errors)."""
        self._items.append((sequence.result, ErrorResponse(sequence.id, message, sequence.id)))
        self._end(sequence, None)

    def _fail_step(self, fault: StepFault) -> bool:
        """Handle a failed step; return False if the loop ends."""
        if fault.fault is Fault.HANG:
            self._hand_over()
            threading.Event().wait()
        if fault.fault is Fault.FATAL:
            self._died(RuntimeError(str(fault)))
            return False
        # _handle_errors fails all active requests with the same text. Waiting ones go on – or, with the overlap scheduler,
        # wait forever: its loop ends with "assert sample_state is not None".
        for sequence in list(self.active):
            self._fail(sequence, str(fault))
        return not self._settings.step_fail_ends

    def _measure(self) -> None:
        """Add the statistics of an iteration, with the library's keys (cpp/tensorrt_llm/executor/jsonSerialization.cpp).

        Those of the first rank; 1.3 adds an entry for each of the others.
        """
        self._iteration += 1
        self.statistics.append(self._entry(self.ranks[0]))
        if self._release.blocks_for_stats:
            for number, rank in enumerate(self.ranks[1:], 1):
                self.statistics.append(self._entry(rank) | {"attentionDpRank": number})

    def _entry(self, rank: Rank) -> dict[str, Any]:
        limits = self.limits
        free = {w: most - rank.used_blocks[w] for w, most in limits.windows.items()}
        cache = {
            "maxNumBlocks": limits.max_num_blocks,
            "freeNumBlocks": sum(free.values()),
            "usedNumBlocks": limits.max_num_blocks - sum(free.values()),
            "tokensPerBlock": limits.block_size,
        }
        # Waiting sequences are not counted (py_executor.py near 1.2.1).
        entry = {"iter": self._iteration, "numQueuedRequests": self._inbox.qsize(), "kvCacheStats": cache}
        if self._release.tells_windows:
            entry["kvCacheIterationStats"] = {
                str(w): {"primaryMaxNumBlocks": limits.windows[w], "primaryFreeNumBlocks": free[w]} for w in free
            }
        entry["iterLatencyMS"] = self._settings.step_ms
        if self._drafting:
            entry["specDecodingStats"] = {
                "numDraftTokens": self._drafted,
                "numAcceptedTokens": self._accepted,
                "numRequestsWithDraftTokens": self._drafting,
            }
            self._drafted = self._accepted = self._drafting = 0
        return entry

    def _hand_over(self) -> None:
        """Hand the items of an iteration to their readers by one callback on the event loop."""
        if (items := self._items) and not self._is_mute:
            self._items = []
            try:
                self._loop.call_soon_threadsafe(put, items)
            except RuntimeError:  # proxy.py, EventLoopShutdownError
                log.warning("the event loop of the readers is closed")


def put(items: list[tuple[RequestOutput, Any]]) -> None:
    """Wake the readers of these items. Called on their loop."""
    for result, item in items:
        result.items.put_nowait(item)
