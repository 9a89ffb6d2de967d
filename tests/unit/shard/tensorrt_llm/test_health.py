"""Failures of the engine: one request, one step, the worker processes, hangs; the watchdog and the statistics."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from self_driver import SelfDriver
from standin import read_log
from trtllm_engines import Engines

from text_generation_common.heartbeat import CHECK_EVERY_S
from text_generation_proto.values import FailureCode, Stopping
from text_generation_shard.engine import NewSequence, Orders
from text_generation_shard.engines.tensorrt_llm.engine import EngineBroken, TensorRTEngine
from text_generation_shard.engines.tensorrt_llm.statistics import IterationStatistics
from text_generation_shard.engines.tensorrt_llm.watchdog import Activity, Watchdog, find_workers

PROMPT = tuple(range(100, 120))


def until_broken(engine: TensorRTEngine) -> str:
    with pytest.raises(EngineBroken) as caught:
        for _ in range(200):
            engine.step()
    return str(caught.value)


def test_a_failing_sequence_fails_alone(built: Engines) -> None:
    driver = SelfDriver(built(fail_token=777, step_ms=1))
    bad, good = driver.admit([1, 2, 777, 3], 10), driver.admit(PROMPT, 30)
    driver.run()
    assert bad.failure is not None
    assert (bad.tokens, bad.failure.code) == ([1, 2], FailureCode.STEP)
    assert good.tokens == [*PROMPT, *PROMPT[:10]]


def test_an_output_that_the_library_cannot_read_fails_its_request_alone(built: Engines, tmp_path: Path) -> None:
    """With the first output of a request, and later."""
    driver = SelfDriver(built(unscored_token=777, step_ms=1, log=tmp_path / "log"))
    good = driver.admit(PROMPT, 200)
    bad = [driver.admit(prompt, 900) for prompt in ([1, 2, 777, 3], [777, 1])]
    driver.run()
    for stream in bad:
        assert stream.failure is not None
        assert stream.failure.code is FailureCode.STEP
        assert stream.failure.message.startswith(("logprobs length: ", "AssertionError"))
    assert good.tokens == [*PROMPT * 10]
    after = driver.admit(PROMPT, 5)
    driver.run()
    assert after.tokens == list(PROMPT[:5])
    log = read_log(tmp_path / "log")
    assert log.ends["cancelled"] == 2
    prompts = [request["prompt"] for request in log.of("request")]
    assert [1] * 4 in prompts[prompts.index([777, 1]) :], "the engine is probed after an output that cannot be read"


@pytest.mark.parametrize("ends", [False, True], ids=["and the engine goes on", "and the engine's loop ends"])
def test_a_failed_step_fails_all_sequences(built: Engines, ends: bool) -> None:
    """With the overlap scheduler, the loop of 1.2 silently ends after a failed step."""
    engine = built(step_fail_token=777, step_fail_ends=int(ends), step_ms=1, hang_timeout=2.0 if ends else 60.0)
    driver = SelfDriver(engine)
    streams = [driver.admit(PROMPT, 2000) for _ in range(3)]
    while not all(stream.tokens for stream in streams):
        driver.step()
    streams.append(driver.admit([5, 6, 777, 8], 10))
    if ends:
        with pytest.raises(EngineBroken):
            driver.run()
        return
    driver.run()
    assert all(stream.failure is not None for stream in streams)
    after = driver.admit(PROMPT, 5)
    driver.run()
    assert after.tokens == list(PROMPT[:5])


def test_a_dead_worker_process_is_noticed_while_idle(built: Engines) -> None:
    engine = built(workers=1)
    reported = threading.Event()
    engine.on_broken(lambda _: reported.set())
    (worker,) = find_workers()
    os.kill(worker.pid, signal.SIGKILL)
    assert reported.wait(20)
    assert "died" in until_broken(engine)


def test_a_hang_breaks_the_engine_although_requests_keep_coming(built: Engines) -> None:
    engine = built(hang_step_token=777, step_ms=1, hang_timeout=1.5)
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    engine.on_broken(reasons.put)
    engine.apply(Orders(1, placements=(NewSequence(0, (5, 6, 777, 8), Stopping(10)),)))
    with pytest.raises(EngineBroken, match="has brought nothing"):
        for slot in range(1, 20):  # each step waits for a second
            engine.apply(Orders(slot + 1, placements=(NewSequence(slot, PROMPT, Stopping(5)),)))
            engine.step()
    assert "has brought nothing" in reasons.get(timeout=20)  # from the thread of the watchdog
    assert reasons.empty()


def test_a_long_prompt_is_not_a_hang(built: Engines) -> None:
    engine = built(prefill_us=1000, hang_timeout=2.0)
    driver = SelfDriver(engine)
    stream = driver.admit(range(10, 1610), 3)  # 1.6 s in one step
    driver.run()
    assert stream.tokens == [10, 11, 12]


def test_an_error_of_the_engine_breaks_it(built: Engines) -> None:
    """1.2 may report nothing. A callback that comes late is called too."""
    engine = built(fatal_token=777, step_ms=1, hang_timeout=2.0)
    early: queue.SimpleQueue[str] = queue.SimpleQueue()
    late: list[str] = []
    engine.on_broken(early.put)
    engine.apply(
        Orders(1, placements=(NewSequence(0, (5, 6, 777, 8), Stopping(10)), NewSequence(1, PROMPT, Stopping(50))))
    )
    reason = until_broken(engine)
    engine.on_broken(late.append)
    # The thread of the engine may learn of it before the one that calls back.
    while early.get(timeout=20) != reason:
        pass
    assert late == [reason]


# -------------------------------------------------------------------------------------------------------------- watchdog


def test_a_request_to_an_idle_engine_restarts_the_clock(built: Engines) -> None:
    engine = built()
    before = engine.activity()
    assert (before.running, before.waiting_prompt_tokens) == (0, 0)
    now = time.monotonic()
    engine.apply(Orders(1, placements=(NewSequence(0, PROMPT, Stopping(3)),)))
    assert engine.activity().last_sign >= now > before.last_sign


def watchdog(
    *,
    healthy: Callable[[], bool] = lambda: True,
    running: int = 1,
    prompt_tokens: int = 0,
    hang_timeout_s: float = 60.0,
) -> Watchdog:
    """Return the watchdog of an engine that shows no sign of life after its first check."""
    return Watchdog(healthy, lambda: Activity(running, prompt_tokens, 0.0), hang_timeout_s, lambda _: None)


def unanswered() -> bool:
    raise ConnectionError("no answer")


@pytest.mark.parametrize(
    ("subject", "seconds", "reason"),
    [
        (watchdog(), 58.5, None),
        (watchdog(), 59, "the engine has brought nothing for 59 s, with 1 requests running"),
        (watchdog(running=0), 600, None),
        (watchdog(prompt_tokens=11_000), 69.5, None),
        (watchdog(prompt_tokens=11_000), 70, "the engine has brought nothing for 70 s"),
        (watchdog(hang_timeout_s=0, prompt_tokens=9), 600, None),
        (watchdog(healthy=lambda: False), 0, "the engine says that it is not healthy"),
        (watchdog(healthy=unanswered), 0, "the engine does not say whether it is healthy: ConnectionError: no answer"),
    ],
    ids=["recent", "hang", "idle", "long prompt", "hang at a long prompt", "off", "unhealthy", "no answer"],
)
def test_watchdog(subject: Watchdog, seconds: float, reason: str | None) -> None:
    *before, found = [subject.check() for _ in range(1 + int(seconds / CHECK_EVERY_S))]
    assert set(before) <= {None}
    assert found is None if reason is None else str(found).startswith(reason)


def test_the_watchdog_reports_once() -> None:
    reasons: list[str] = []
    reported = threading.Event()

    def report(reason: str) -> None:
        reasons.append(reason)
        reported.set()

    subject = Watchdog(unanswered, lambda: Activity(0, 0, 0.0), 60.0, report)
    subject.start()
    assert reported.wait(20)
    assert len(reasons) == 1


# ------------------------------------------------------------------------------------------------------------ statistics


class Reporting:
    """An LLM with these statistics; an exception among them is raised. `get_stats` may take any time."""

    def __init__(self, *entries: object) -> None:
        self.entries = entries

    async def get_stats_async(self, timeout: float) -> AsyncIterator[Mapping[str, Any]]:
        for entry in self.entries:
            if isinstance(entry, Exception):
                raise entry
            yield entry  # type: ignore[misc]


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)
    loop.close()


DRAFTS = {"numRequestsWithDraftTokens": 2, "numDraftTokens": 6, "numAcceptedTokens": 3}


def blocks(free: object) -> dict[str, object]:
    return {"kvCacheStats": {"freeNumBlocks": free, "maxNumBlocks": 99, "tokensPerBlock": 64}}


def windows(*free: int, reused: int = 0) -> dict[str, object]:
    pools = {str(64 * at): {"primaryFreeNumBlocks": each} for at, each in enumerate(free, 1)}
    return {"kvCacheIterationStats": pools | {"-2": {"primaryFreeNumBlocks": 1}, "9": {"iterReusedBlocks": reused}}}


def test_statistics(loop: asyncio.AbstractEventLoop) -> None:
    llm = Reporting()
    statistics = IterationStatistics(llm, loop, by_call=False)  # type: ignore[arg-type]
    started = statistics.progressed_at
    for entries, used, queued in (
        ([{"iter": 1} | blocks("many")], 0, 0),
        ([{"iter": 2} | blocks(50), {"iter": 2} | blocks(43), TimeoutError()], 7, 0),
        ([ValueError()], 7, 0),
        ([{}, {"iter": 3, "numQueuedRequests": 2} | blocks(41)], 9, 2),
        ([{"iter": 3, "numQueuedRequests": 2, "inflightBatchingStats": {"numQueuedContextRequests": 4}}], 9, 4),
        ([{"iter": 4, "kvCacheStats": None, "inflightBatchingStats": None}, {"iter": 4, "attentionDpRank": 1}], 9, 0),
        ([{"iter": 4} | blocks(50), {"iter": 4, "rank": 1} | blocks(3)], 0, 0),
    ):
        llm.entries = tuple(entries)
        statistics.poll()
        assert (statistics.used_blocks, statistics.queued) == (used, queued)
    assert (statistics.iteration, statistics.num_blocks, statistics.block_size) == (4, 50, 64)
    assert statistics.progressed_at > started


def test_the_pool_is_that_of_the_window_with_the_fewest_blocks(loop: asyncio.AbstractEventLoop) -> None:
    for entries, pool in (([blocks(90)], 45), ([blocks(90) | windows(30, 60)], 30)):
        llm = Reporting(*entries)
        statistics = IterationStatistics(llm, loop, windows=2, by_call=False)  # type: ignore[arg-type]
        statistics.poll()
        assert (statistics.num_blocks, statistics.used_blocks) == (pool, 0)


def test_the_totals_are_kept(loop: asyncio.AbstractEventLoop) -> None:
    llm = Reporting({"iter": 1, "iterLatencyMS": 3.0, "specDecodingStats": DRAFTS})
    statistics = IterationStatistics(llm, loop, by_call=False)  # type: ignore[arg-type]
    statistics.poll()
    llm.entries = (
        {"iter": 2, "iterLatencyMS": 9.0, "gpuForwardTimeMS": 2.0},
        {"iter": 2, "attentionDpRank": 1, "gpuForwardTimeMS": 2.0},
    )
    statistics.poll()
    assert statistics.totals == {"forward_ns": 5_000_000, "drafts": 2, "draft_tokens": 6, "accepted_tokens": 3}
