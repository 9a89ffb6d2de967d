"""Streams over NVIDIA's proxy, queues, worker and results: each ends once, none keeps memory, none harms another."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

import psutil
from engine_driver import Stream
from self_driver import SelfDriver
from standin import read_log
from trtllm_engines import Engines, until

from text_generation_proto.values import FailureCode, FinishReason

STREAMS = 10_000
WARM = STREAMS // 5
MAX_GROWTH = 24 << 20
"""Bytes that the process may grow by after the first WARM streams."""


def echoed(prompt: Sequence[int], count: int) -> list[int]:
    return list(islice(cycle(prompt), count))


def test_ten_thousand_streams_a_third_of_which_hang_up(built: Engines, tmp_path: Path) -> None:
    log, draw = tmp_path / "log", random.Random(11)
    engine = built(log=log, step_ms=0, max_batch_size=64, options="kv_cache_config: {max_tokens: 2048}")
    driver = SelfDriver(engine)
    leaving: dict[Stream, int] = {}
    """Running streams that hang up → the step at which they do."""
    running: set[Stream] = set()
    begun = gone = warm = steps = 0
    while begun < STREAMS or running:
        for stream in running.difference(driver.streams.values()):
            assert stream.tokens == echoed(stream.prompt, stream.stopping.max_new_tokens)
            assert stream.finish is FinishReason.LENGTH
            leaving.pop(stream, None)
            running.remove(stream)
        for stream in [stream for stream in leaving if steps >= leaving[stream]]:
            assert stream.tokens == echoed(stream.prompt, len(stream.tokens))
            driver.release(stream)
            del leaving[stream]
            running.remove(stream)
            gone += 1
        while begun < STREAMS and len(running) < 64:
            start, length, leaves = draw.randrange(10, 4000), draw.randrange(1, 40), draw.random() < 0.3
            stream = driver.admit(range(start, start + length), 100 if leaves else draw.randrange(2, 40))
            running.add(stream)
            begun += 1
            if leaves:
                leaving[stream] = steps + draw.randrange(30)
            if begun == WARM:
                warm = psutil.Process().memory_info().rss
        driver.step()
        steps += 1
    grown = psutil.Process().memory_info().rss - warm
    assert 0.25 * STREAMS < gone < 0.35 * STREAMS
    entries = engine._llm._executor._results
    until(lambda: not entries)
    print(f"{STREAMS} streams, {gone} hang-ups: grown by {grown / 2**20:.1f} MiB")
    assert grown < MAX_GROWTH
    built.close()
    seen = read_log(log)
    assert seen.unfinished == set()
    assert (seen.ends["dropped"], seen.ends["error"]) == (0, 0)
    assert seen.ends["cancelled"] > 100, "many end before they can be aborted, not all"
    assert len(seen.of("request")) == sum(seen.ends.values())


def test_an_assertion_of_one_result_leaves_sixteen_others_alone(built: Engines, tmp_path: Path) -> None:
    engine = built(unscored_token=777, step_ms=1, log=tmp_path / "log")
    broken: list[str] = []
    engine.on_broken(broken.append)
    driver = SelfDriver(engine)
    good = [driver.admit(range(100 + 30 * n, 120 + 30 * n), 300) for n in range(16)]
    while not all(stream.tokens for stream in good):
        driver.step()
    bad = driver.admit([1, 2, 777, 3], 900)
    driver.run()
    assert bad.failure is not None
    assert (bad.failure.code, bad.tokens) == (FailureCode.STEP, [1, 2])
    for stream in good:
        assert (stream.tokens, stream.finish) == (echoed(stream.prompt, 300), FinishReason.LENGTH)
    assert broken == []
    until(lambda: read_log(tmp_path / "log").ends["cancelled"] == 1)


def test_an_engine_is_closed_amid_streams(built: Engines, tmp_path: Path) -> None:
    """The library's sockets belong to one thread at a time: the last aborts come from another one than the requests."""
    for number in range(5):
        engine = built(step_ms=0, max_batch_size=64, log=tmp_path / f"log{number}")
        driver = SelfDriver(engine)
        for start in range(64):
            driver.admit(range(100 + start, 110 + start), 2000)
        driver.step()
        built.close()
        assert read_log(tmp_path / f"log{number}").unfinished == set()
