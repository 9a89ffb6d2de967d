"""The TensorRT-LLM engine: whole prompts in, tokens as they come. Batches, KV blocks and order are the library's own.

    apply    an admission becomes a request; a release aborts one
    step     waits for what the requests bring, and tells it

The library computes in processes of its own and hands tokens to an event loop (`driver`); `stream` reads one request, `parameters`
translates what is asked, `statistics` and `watchdog` look after the whole. What concerns one request fails that request. When
everything that runs fails at once, or nothing comes any more, the engine is broken: `step` raises, and the shard ends.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import structlog

from text_generation_proto.values import FailureCode, Stopping
from text_generation_shard.checks import NO_BLOCKS, admission_problem, meant_for_steps
from text_generation_shard.engine import (
    EngineError,
    EngineInfo,
    Failure,
    InsufficientMemory,
    NewSequence,
    Orders,
    StepResult,
    TopTokens,
    WarmUpLimits,
)
from text_generation_shard.engines.tensorrt_llm.api import LLM
from text_generation_shard.engines.tensorrt_llm.driver import Driver, first_line
from text_generation_shard.engines.tensorrt_llm.library import Library
from text_generation_shard.engines.tensorrt_llm.parameters import Parameters
from text_generation_shard.engines.tensorrt_llm.statistics import Statistics
from text_generation_shard.engines.tensorrt_llm.stream import News, Stream
from text_generation_shard.engines.tensorrt_llm.watchdog import Progress, Watchdog
from text_generation_shard.engines.tensorrt_llm.workers import workers

STEP_WAIT_S = 1.0
"""A step that nothing comes in returns after so long: its thread is not to be gone for ever."""
PROOF_TIMEOUT_S = 30.0
"""A token that proves, in the middle of serving, that the engine still computes."""
CAPACITY_TIMEOUT_S = 30.0
BROKEN_SHUTDOWN_S = 1.0

log = structlog.get_logger()


class EngineBroken(RuntimeError):
    """The engine will not compute again."""


@dataclass(frozen=True, slots=True)
class Running:
    """An engine that was built: what `TensorRTEngine` drives."""

    llm: LLM
    library: Library
    parameters: Parameters
    info: EngineInfo


class TensorRTEngine:
    """See the module. Made by `build.build`."""

    def __init__(self, running: Running, hang_timeout_s: float, first_token_timeout_s: float) -> None:
        """Proves that a token can be produced. Raises EngineError if none comes."""
        self._llm = running.llm
        self._library = running.library
        self._parameters = running.parameters
        self._info = running.info
        self._held: dict[int, Stream] = {}
        """By slot."""
        self._broken: str | None = None
        self._tell_broken: Callable[[str], None] | None = None
        self._began_at = time.monotonic()
        """When a request last began of an engine with nothing to do."""
        self._num_blocks = 0
        self._driver = Driver(running.llm, (running.library.request_error,), self._break)
        self._statistics = Statistics(running.llm)
        self._watchdog = Watchdog(
            lambda: self._library.is_healthy(self._llm),
            self._progress,
            hang_timeout_s,
            self._break,
        )
        self._watchdog.watch(workers())
        self._watchdog.start()
        try:
            self._prove(first_token_timeout_s)
            self._watchdog.watch(workers())  # by now they are all there
            self._pool_blocks = self._measure_pool()
        except EngineBroken as error:
            self.close()
            raise EngineError(f"TensorRT-LLM produces no token: {error}") from error
        asyncio.run_coroutine_threadsafe(self._statistics.follow(lambda: bool(self._held)), self._driver.loop)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def grammars(self) -> None:
        """Guided decoding is the library's own."""
        return None

    def warm_up(self, limits: WarmUpLimits) -> int:
        self.reset()
        asked = limits.max_batch_total_tokens // self._info.block_size
        if asked > self._pool_blocks:
            pool = self._pool_blocks * self._info.block_size
            raise InsufficientMemory(
                f"the engine's KV cache holds {pool} tokens, fewer than the {limits.max_batch_total_tokens} asked for"
            )
        self._num_blocks = asked if limits.max_batch_total_tokens else self._pool_blocks
        return self._num_blocks

    def apply(self, orders: Orders) -> list[Failure]:
        for slot in orders.release:
            self._drop(slot)
        failed = [failure for admission in orders.admit if (failure := self._admit(admission)) is not None]
        failed += [self._refuse(slot, problem) for slot, problem in meant_for_steps(orders) if slot in self._held]
        return failed

    def step(self) -> StepResult | None:
        if self._broken is None and not self._held:
            return None
        came = self._driver.collect(STEP_WAIT_S)
        if self._broken is None and self._all_failed(came):
            # A failed step fails whatever was in it, and in some versions ends the loop behind it in silence.
            self._prove(PROOF_TIMEOUT_S)
        if self._broken is not None:
            raise EngineBroken(self._broken)
        return self._result(came)

    @property
    def running(self) -> int:
        return len(self._held)

    @property
    def used_blocks(self) -> int:
        statistics = self._statistics
        return self._in_our_blocks(statistics.used_blocks, statistics.block_size or self._info.block_size)

    @property
    def queued(self) -> int:
        return min(self._statistics.queued, len(self._held))

    def wake(self) -> None:
        self._driver.wake()

    def on_broken(self, tell: Callable[[str], None]) -> None:
        self._tell_broken = tell
        if self._broken is not None:
            tell(self._broken)

    def reset(self) -> None:
        for slot in list(self._held):
            self._drop(slot)

    def close(self) -> None:
        """End the engine. May take as long as the library pleases: the caller has a deadline, and ends the processes."""
        self._watchdog.close()
        self.reset()
        # The loop goes on meanwhile: the library waits for what it was asked to abort.
        ending = threading.Thread(target=self._shut_down, name="tensorrt-llm shutdown", daemon=True)
        ending.start()
        # A library whose engine is lost may wait for it for ever.
        ending.join(None if self._broken is None else BROKEN_SHUTDOWN_S)
        self._driver.close()

    def _shut_down(self) -> None:
        try:
            self._llm.shutdown()
        except Exception as error:  # noqa: BLE001 - it ends either way
            log.warning("the engine did not shut down in order", reason=first_line(error))

    # -------------------------------------------------------------------------------------------------------- requests

    def _admit(self, admission: NewSequence) -> Failure | None:
        slot = admission.slot
        if (problem := self._problem(admission)) is not None:
            return self._refuse(slot, problem)
        try:
            arguments = self._parameters.arguments(admission)
        except (ValueError, TypeError) as error:
            return self._refuse(slot, first_line(error))
        if not self._held:
            # The engine may have been idle for hours; while others wait, one more is no sign of life. Said before it is
            # held: the watchdog looks at any time.
            self._began_at = time.monotonic()
        stream = self._held[slot] = Stream(admission)
        self._driver.begin(stream, arguments)
        return None

    def _problem(self, admission: NewSequence) -> str | None:
        if admission.slot in self._held:
            return f"slot {admission.slot} is taken"
        if admission.blocks or admission.computed_tokens:
            return NO_BLOCKS
        problem = admission_problem(admission, self._info) or self._parameters.problem(admission)
        # The last token is never computed, but the engine counts it: it would cut the sequence short.
        longest = len(admission.prompt) + admission.stopping.max_new_tokens
        if problem is None and longest > self._num_blocks * self._info.block_size:
            pool = self._num_blocks * self._info.block_size
            return f"prompt and new tokens exceed the engine's KV pool of {pool} tokens"
        return problem

    def _drop(self, slot: int) -> None:
        if (stream := self._held.pop(slot, None)) is not None:
            self._driver.drop(stream)

    def _refuse(self, slot: int, problem: str) -> Failure:
        self._drop(slot)
        return Failure(slot, FailureCode.INVALID, problem)

    def _result(self, came: Mapping[Stream, News]) -> StepResult:
        result = StepResult()
        for stream, news in came.items():
            slot = stream.admission.slot
            if self._held.get(slot) is not stream:
                continue  # dropped while this was on its way
            if news.token_ids:
                result.slots.append(slot)
                result.token_counts.append(len(news.token_ids))
                result.token_ids += news.token_ids
                result.logprobs += news.logprobs
                for index, (token_ids, logprobs) in enumerate(news.tops):
                    result.top_tokens.append(TopTokens(slot, index, token_ids, logprobs))
            if news.prompt_scores is not None:
                result.prompt_logprobs.append(news.prompt_scores)
            if news.is_end:
                del self._held[slot]
            if news.finish is not None:
                result.finished.append((slot, news.finish))
            elif news.failure is not None:
                result.failed.append(Failure(slot, *news.failure))
        return result

    # ---------------------------------------------------------------------------------------------------------- health

    def _all_failed(self, came: Mapping[Stream, News]) -> bool:
        """Whether everything that was in the engine has failed there."""
        failed = {
            stream for stream, news in came.items() if news.failure is not None and news.failure[0] is FailureCode.STEP
        }
        return bool(failed) and failed.issuperset(self._held.values())

    def _progress(self) -> Progress:
        held = list(self._held.values())
        return Progress(
            running=len(held),
            waiting_prompt_tokens=sum(len(stream.admission.prompt) for stream in held if stream.waiting),
            last_sign=max(self._began_at, self._driver.heard_at, self._statistics.progressed_at),
        )

    def _break(self, reason: str) -> None:
        """From any thread."""
        if self._broken is None:
            self._broken = reason
            log.error("the engine is broken", reason=reason)
            self._driver.wake()
            if self._tell_broken is not None:
                self._tell_broken(reason)

    def _prove(self, timeout_s: float) -> None:
        """Have the engine produce a token beside whatever runs. Raises EngineBroken if none comes in time."""
        token = min(self._info.vocab_size - 1, 1)
        admission = NewSequence(0, (token,) * 4, Stopping(1))
        self._began_at = time.monotonic()
        arguments = self._parameters.arguments(admission)
        if (problem := self._driver.prove(arguments, timeout_s, lambda: self._broken)) is not None:
            self._break(problem)
        if self._broken is not None:
            raise EngineBroken(self._broken)

    def _measure_pool(self) -> int:
        """KV blocks of the pool. Raises EngineBroken."""
        try:
            told = self._library.kv_capacity(self._llm)
        except Exception as error:  # noqa: BLE001 - its statistics say the same, later
            log.warning("the engine could not be asked how large its KV cache is", reason=first_line(error))
            told = None
        if told is not None:
            return self._in_our_blocks(*told)
        until = time.monotonic() + CAPACITY_TIMEOUT_S
        while time.monotonic() < until:
            with suppress(TimeoutError):  # a loop that is held up: the proof fails, too
                asyncio.run_coroutine_threadsafe(self._statistics.look(), self._driver.loop).result(CAPACITY_TIMEOUT_S)
            if self._statistics.num_blocks and self._statistics.block_size:
                return self._in_our_blocks(self._statistics.num_blocks, self._statistics.block_size)
            self._prove(PROOF_TIMEOUT_S)  # some versions have something to say only once there is something new
        blocks = self._info.max_slots * -(-self._info.max_sequence_length // self._info.block_size)
        log.warning("the engine does not say how large its KV cache is: it is left to its own queue")
        return blocks

    def _in_our_blocks(self, blocks: int, block_size: int) -> int:
        return blocks * block_size // self._info.block_size
