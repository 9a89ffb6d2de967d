"""The TensorRT-LLM engine: it takes whole prompts and schedules batches and KV blocks itself.

    apply    submit a request for each new sequence, abort the request of each released one
    step     wait for output of the requests, and report it

The library computes in its own processes and delivers tokens to an event loop (`request_loop`). `stream` reads one request,
`parameters` maps its parameters, `statistics` and `watchdog` observe the engine. An error of one request fails that request. If all
running requests fail at once, or no output arrives, the engine is broken: `step` raises, and the shard exits.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import Any

from text_generation_common.log import log
from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.values import FailureCode, Stopping, WarmUpLimits
from text_generation_shard.adapters import LoraAdapter
from text_generation_shard.engine import (
    Drafting,
    EngineError,
    Failure,
    InsufficientMemory,
    NewSequence,
    Orders,
    StepResult,
    TopTokens,
)
from text_generation_shard.engines.tensorrt_llm.construct import Construction
from text_generation_shard.engines.tensorrt_llm.library import LLM, Library, explain, is_healthy
from text_generation_shard.engines.tensorrt_llm.parameters import Parameters
from text_generation_shard.engines.tensorrt_llm.request_loop import RequestLoop, probe_problem
from text_generation_shard.engines.tensorrt_llm.statistics import POLLS, IterationStatistics
from text_generation_shard.engines.tensorrt_llm.stream import Stream, StreamUpdate
from text_generation_shard.engines.tensorrt_llm.watchdog import Activity, Watchdog, find_workers
from text_generation_shard.sequence_checks import NO_BLOCKS, meant_for_steps, sequence_problem

STEP_WAIT_S = 1.0
"""Longest time that `step` waits for output."""
FIRST_TOKEN_TIMEOUT_S = 600.0
"""Time for the first token after a build: it may include the tuning of kernels."""
PROBE_TIMEOUT_S = 30.0
"""Time for the token of a probe while serving, and for the size of the KV cache."""
CAPACITY_POLL_S = 0.05
BROKEN_SHUTDOWN_S = 1.0


class EngineBroken(RuntimeError):
    """The engine cannot compute again; it must be restarted."""


class TensorRTEngine:
    def __init__(
        self,
        llm: LLM,
        library: Library,
        parameters: Parameters,
        construction: Construction,
        hang_timeout_s: float,
    ) -> None:
        """Generate one token to check the engine. Raises EngineError if none arrives."""
        self._llm = llm
        self._parameters = parameters
        self.info = construction.info
        speculation = construction.capabilities.speculation
        self._drafts = speculation is not None
        self._reserved_tokens = 0 if speculation is None else speculation.reserved_tokens
        self._streams: dict[int, Stream] = {}
        """Slot → stream."""
        self._broken: str | None = None
        self._broken_callback: Callable[[str], None] | None = None
        self._began_at = time.monotonic()
        """Time of the last submission to an idle engine."""
        self._num_blocks = 0
        self._requests = RequestLoop(llm, library.request_error, self._set_broken)
        self._statistics = IterationStatistics(
            llm, self._requests.loop, windows=construction.windows, by_call=library.calls_workers
        )
        self._reported = Counter[str]()
        """The part of the statistics' totals that is in reports."""
        self._drafted = Counter[str]()
        """Sums over responses, where the release has them: the fields of Drafting."""
        self._watchdog = Watchdog(partial(is_healthy, llm), self.activity, hang_timeout_s, self._set_broken)
        self._watchdog.watch(find_workers())
        self._watchdog.start()
        try:
            for adapter in ("", *self.info.adapters):
                self._probe(FIRST_TOKEN_TIMEOUT_S, adapter)
            self._watchdog.watch(find_workers())  # all of them exist now
            self._pool_blocks = self._measure_pool()
            if self.info.ranks > 1:  # one rank holds a whole sequence
                longest = self._pool_blocks // self.info.ranks * self.info.block_size
                self.info = replace(self.info, max_sequence_length=min(self.info.max_sequence_length, longest))
        except EngineBroken as error:
            self.close()
            raise EngineError(f"TensorRT-LLM produces no token: {error}") from error
        self._statistics.start()

    decode_images = grammars = None  # the library does guided decoding itself

    def warm_up(self, limits: WarmUpLimits) -> tuple[CacheGroup, ...]:
        self.reset()
        num_blocks = limits.max_batch_total_tokens // self.info.block_size
        if num_blocks > self._pool_blocks:
            pool = self._pool_blocks * self.info.block_size
            raise InsufficientMemory(
                f"the engine's KV cache holds {pool} tokens, fewer than the {limits.max_batch_total_tokens} asked for"
            )
        self._num_blocks = num_blocks if limits.max_batch_total_tokens else self._pool_blocks
        return (CacheGroup(self._num_blocks),)

    def apply(self, orders: Orders) -> list[Failure]:
        for slot in orders.release:
            self._drop(slot)
        failed = [failure for sequence in orders.placements if (failure := self._place(sequence)) is not None]
        failed += [self._refuse(slot, problem) for slot, problem in meant_for_steps(orders) if slot in self._streams]
        return failed

    def set_adapter(self, name: str, adapter: LoraAdapter | None) -> Iterator[None]:
        others, loras = tuple(each for each in self.info.adapters if each != name), self._parameters.adapters
        if adapter is None:
            self.info = replace(self.info, adapters=others)
            while any(stream.sequence.adapter == name for stream in self._streams.values()):
                yield
            del loras[name]  # the library drops the adapter that was used least recently
            return
        loras.add(adapter)
        probe, deadline = self._requests.begin_probe(self._probe_arguments(name)), time.monotonic() + PROBE_TIMEOUT_S
        while not probe.done() and time.monotonic() < deadline:
            yield
        if (
            problem := probe_problem(probe) if probe.done() else f"no token within {PROBE_TIMEOUT_S:.0f} s"
        ) is not None:
            probe.cancel()
            del loras[name]
            raise EngineError(f"the LoRA adapter {name}: {problem}")
        self.info = replace(self.info, adapters=(*others, name))

    def step(self) -> StepResult | None:
        if self._broken is None and not self._streams:
            result = StepResult()
            self._report_totals(result)  # the statistics of the last iterations lag behind their tokens
            return result if result.forward_ns or result.drafting else None
        self._statistics.polls_left = POLLS
        updates = self._requests.collect(STEP_WAIT_S)
        if self._broken is None and (self._requests.has_read_error or self._all_failed(updates)):
            # A failed step fails all its requests, and in some versions silently ends the engine's loop.
            self._requests.has_read_error = False
            self._probe(PROBE_TIMEOUT_S)
        if self._broken is not None:
            raise EngineBroken(self._broken)
        return self._result(updates)

    @property
    def running(self) -> int:
        return len(self._streams)

    @property
    def used_blocks(self) -> int:
        statistics, running = self._statistics, bool(self._streams)  # the last entry describes a busy iteration
        return running * self._to_blocks(statistics.used_blocks, statistics.block_size or self.info.block_size)

    @property
    def queued(self) -> int:
        return min(self._statistics.queued, len(self._streams))

    @property
    def prefilling(self) -> int:
        return self.activity().waiting_prompt_tokens

    def wake(self) -> None:
        self._requests.wake()

    def on_broken(self, tell: Callable[[str], None]) -> None:
        self._broken_callback = tell
        if self._broken is not None:
            tell(self._broken)

    def reset(self) -> None:
        for slot in list(self._streams):
            self._drop(slot)

    def close(self) -> None:
        """Shut the library down. This may take any time: the caller sets a deadline and then ends the processes."""
        self._watchdog.close()
        self._statistics.close()
        self._requests.leave()  # its loop runs on: the library waits for the requests, which it aborts
        self.reset()
        shutdown = Thread(target=self._shut_down, name="tensorrt-llm shutdown", daemon=True)
        shutdown.start()
        # If the engine is lost, the library may wait for it forever.
        shutdown.join(None if self._broken is None else BROKEN_SHUTDOWN_S)
        self._requests.close()

    def _shut_down(self) -> None:
        try:
            self._llm.shutdown()
        except Exception as error:  # noqa: BLE001 - the shard exits anyway
            log.warning("the engine did not shut down cleanly", reason=explain(error))

    # -------------------------------------------------------------------------------------------------------- requests

    def _place(self, sequence: NewSequence) -> Failure | None:
        slot = sequence.slot
        if (problem := self._problem(sequence)) is not None:
            return self._refuse(slot, problem)
        try:
            arguments = self._parameters.arguments(sequence)
        except (ValueError, TypeError, RecursionError) as error:
            return self._refuse(slot, explain(error))
        if not self._streams:
            # The engine may have been idle for hours. While other requests wait, another one is not a sign of life.
            # Set before the stream is stored, because the watchdog may check at any time.
            self._began_at = time.monotonic()
        stream = self._streams[slot] = Stream(sequence, self._parameters.may_abort(sequence), self._drafts)
        self._statistics.polls_left = POLLS
        self._requests.start(stream, arguments)
        return None

    def _problem(self, sequence: NewSequence) -> str | None:
        if sequence.slot in self._streams:
            return f"slot {sequence.slot} is taken"
        if sequence.blocks or sequence.computed_tokens:
            return NO_BLOCKS
        problem = self._parameters.problem(sequence) or sequence_problem(sequence, self.info)
        # The last token is never computed, but the engine counts it and would end the sequence early.
        length = len(sequence.prompt) + sequence.stopping.max_new_tokens
        pool = self._num_blocks // self.info.ranks * self.info.block_size - self._reserved_tokens
        if problem is None and length > pool:
            return f"prompt and new tokens exceed the engine's KV pool of {pool} tokens"
        return problem

    def _drop(self, slot: int) -> None:
        if (stream := self._streams.pop(slot, None)) is not None:
            self._requests.drop(stream)

    def _refuse(self, slot: int, problem: str) -> Failure:
        self._drop(slot)
        return Failure(slot, FailureCode.INVALID, problem)

    def _result(self, updates: Mapping[Stream, StreamUpdate]) -> StepResult:
        result = StepResult()
        slots, counts, token_ids, running = result.slots, result.token_counts, result.token_ids, self._streams
        scored = any(update.logprobs for update in updates.values())
        for stream, update in updates.items():
            slot = stream.sequence.slot
            if running.get(slot) is not stream:
                continue  # released meanwhile
            if update.token_ids:
                slots.append(slot)
                counts.append(len(update.token_ids))
                token_ids += update.token_ids
                if scored:
                    result.logprobs += update.logprobs or [math.nan] * len(update.token_ids)
                for index, (top_ids, logprobs) in enumerate(update.tops):
                    result.top_tokens.append(TopTokens(slot, index, top_ids, logprobs))
            if update.drafted is not None:
                self._drafted += update.drafted
            if update.cached_tokens:
                result.cached.append((slot, update.cached_tokens))
            if update.prompt_scores is not None:
                result.prompt_logprobs.append(update.prompt_scores)
            if update.finish is not None:
                result.finished.append((slot, update.finish))
                del running[slot]
            elif update.failure is not None:
                result.failed.append(Failure(slot, *update.failure))
                del running[slot]
        if len(token_ids) == len(slots):
            counts.clear()  # one token each
        self._report_totals(result)
        return result

    def _report_totals(self, result: StepResult) -> None:
        """Report the iterations whose statistics have come since the last report; they lag behind the tokens."""
        # Responses of late releases tell what was drafted; then the statistics, which lag, are not counted, too.
        totals = Counter({**self._statistics.totals, **self._drafted})
        new, self._reported = totals - self._reported, totals
        result.forward_ns = new["forward_ns"]
        if new["drafts"]:
            result.drafting.append(Drafting(new["drafts"], new["draft_tokens"], new["accepted_tokens"]))

    # ---------------------------------------------------------------------------------------------------------- health

    def _all_failed(self, updates: Mapping[Stream, StreamUpdate]) -> bool:
        """Return True if all running requests failed in the engine."""
        failed = {
            stream
            for stream, update in updates.items()
            if update.failure is not None and update.failure[0] is FailureCode.STEP
        }
        return bool(failed) and failed.issuperset(self._streams.values())

    def activity(self) -> Activity:
        """Return the state that the watchdog judges. May be called from any thread."""
        streams = list(self._streams.values())
        return Activity(
            running=len(streams),
            waiting_prompt_tokens=sum(len(stream.sequence.prompt) for stream in streams if stream.waiting),
            last_sign=max(self._began_at, self._requests.last_output_at, self._statistics.progressed_at),
        )

    def _set_broken(self, reason: str) -> None:
        """Record that the engine is broken. May be called from any thread."""
        if self._broken is None:
            self._broken = reason
            log.error("the engine is broken", reason=reason)
            self._requests.wake()
            if self._broken_callback is not None:
                self._broken_callback(reason)

    def _probe(self, timeout_s: float, adapter: str = "") -> None:
        """Generate one token beside the running requests. Raises EngineBroken if it does not arrive in time."""
        self._began_at = time.monotonic()
        if (
            problem := self._requests.probe(self._probe_arguments(adapter), timeout_s, lambda: self._broken)
        ) is not None:
            self._set_broken(f"with the LoRA adapter {adapter}: {problem}" if adapter else problem)
        if self._broken is not None:
            raise EngineBroken(self._broken)

    def _probe_arguments(self, adapter: str) -> dict[str, Any]:
        token = min(self.info.vocab_size - 1, 1)
        return self._parameters.arguments(NewSequence(0, (token,) * 4, Stopping(1), adapter=adapter))

    def _measure_pool(self) -> int:
        """Return the KV blocks of the pool: those that are free after the probes. Raises EngineBroken."""
        deadline = time.monotonic() + PROBE_TIMEOUT_S
        while time.monotonic() < deadline:
            self._statistics.poll()
            if self._statistics.num_blocks and self._statistics.block_size:
                return self._to_blocks(self._statistics.num_blocks, self._statistics.block_size)
            time.sleep(CAPACITY_POLL_S)
            self._probe(PROBE_TIMEOUT_S)  # some versions report only after a new request
        blocks = self.info.max_slots * -(-self.info.max_sequence_length // self.info.block_size)
        log.warning("the engine does not report the size of its KV cache; requests may wait in its own queue")
        return blocks

    def _to_blocks(self, blocks: int, block_size: int) -> int:
        """Convert blocks of one rank to blocks of `info.block_size` of all ranks: some attention kernels use their own size."""
        return blocks * block_size // self.info.block_size * self.info.ranks
