"""Ten thousand streams of clients that hang up at any time, a third of them while queued, with speculative decoding."""

from __future__ import annotations

import random
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import psutil
import pytest
from self_driver import SelfDriver
from standin import read_log

from text_generation_proto.values import FinishReason

STREAMS = 10_000
SLOTS = 64
WARM = 2_000
"""Streams after which memory has reached its size."""
MAX_GROWTH = 24 << 20
"""Bytes: the record of the requests is in a file, and each stream is forgotten when it ends."""
DRAFTERS = {
    "MTP": "{decoding_type: MTP, max_draft_len: 3}",
    "Eagle3": "{decoding_type: Eagle3, max_draft_len: 3, speculative_model: draft}",
    "NGram": "{decoding_type: NGram, max_draft_len: 3}",
    "draft model": "{decoding_type: DraftTarget, max_draft_len: 3, speculative_model: draft}",
}


@pytest.mark.full
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_stream_ends_once_and_memory_stays(built: Any, tmp_path: Path, drafter: str) -> None:  # noqa: ANN401 - see conftest.py
    draw = random.Random(11)
    engine = built(
        log=tmp_path / "log",
        step_ms=1,
        max_batch_size=SLOTS,
        # Fewer blocks than the slots need: requests wait in the engine.
        options=f"speculative_config: {DRAFTERS[drafter]}\nkv_cache_config: {{max_tokens: 4096}}",
    )
    driver = SelfDriver(engine)
    process = psutil.Process()
    admitted = queued = running = finished = warm = 0
    hesitant: dict[int, object] = {}
    while admitted < STREAMS or driver.streams:
        for slot, stream in list(driver.streams.items()):
            leaves = slot in hesitant and hesitant[slot] is stream
            if leaves and not stream.tokens and draw.random() < 0.5:
                queued += 1
            elif stream.tokens and draw.random() < 0.1:
                running += 1
            else:
                continue
            driver.release(stream)
        while admitted < STREAMS and len(driver.streams) < SLOTS:
            start, length = draw.randrange(10, 4000), draw.randrange(1, 60)
            stream = driver.admit(range(start, start + length), draw.randrange(1, 100))
            admitted += 1
            if draw.random() < 0.5:
                hesitant[stream.slot] = stream
            if admitted == WARM:
                warm = process.memory_info().rss
        before = list(driver.streams.values())
        driver.step()
        for stream in before:
            assert stream.failure is None
            if stream.finish is not None:
                finished += 1
                assert stream.finish is FinishReason.LENGTH
                assert stream.tokens == list(islice(cycle(stream.prompt), stream.stopping.max_new_tokens))
    assert admitted == STREAMS == finished + queued + running
    assert queued > STREAMS * 0.3
    assert running > STREAMS / 20
    grown = process.memory_info().rss - warm
    assert grown < MAX_GROWTH
    built.close()
    entries = read_log(tmp_path / "log")
    assert entries.unfinished == set()
    assert (entries.ends["dropped"], entries.ends["error"]) == (0, 0)
    print(
        drafter,
        dict(entries.ends),
        f"queued {queued}, running {running}, grown {grown} bytes",
    )
