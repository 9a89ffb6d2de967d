"""Thousands of streams that come, go and are cancelled at random: nothing is left in the library, each ends once."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from self_driver import SelfDriver
from standin import VERSIONS, importable, model_folder, read_log

from text_generation_proto.values import FinishReason
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import WarmUpLimits
from text_generation_shard.engines.tensorrt_llm.build import build

STREAMS = int(os.environ.get("CHURN", "1500"))
AT_ONCE = 64


@pytest.mark.parametrize("version", VERSIONS)
def test_nothing_is_left_behind(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    draw = random.Random(7)
    with importable(version, monkeypatch, log=log, step_ms=0):
        config = ShardConfig(
            engine="tensorrt-llm",
            model_path=str(model_folder(tmp_path / "model")),
            max_batch_size=AT_ONCE,
            trtllm_options="kv_cache_config: {max_tokens: 16384}",
        )
        engine = build(config)
        driver = SelfDriver(engine)
        engine.warm_up(WarmUpLimits())
        streams, cancelled = [], set()
        while len(streams) < STREAMS or driver.streams:
            for stream in list(driver.streams.values()):
                if draw.random() < 0.01:
                    driver.release(stream)
                    cancelled.add(stream)
            while len(streams) < STREAMS and len(driver.streams) < AT_ONCE:
                start, length = draw.randrange(10, 4000), draw.randrange(1, 40)
                streams.append(driver.admit(range(start, start + length), draw.randrange(1, 120)))
            driver.step()
        assert engine.running == 0
        assert len(cancelled) > STREAMS / 20
        for stream in streams:
            length = len(stream.prompt)
            assert stream.tokens == [stream.prompt[at % length] for at in range(len(stream.tokens))]
            if stream not in cancelled:
                assert stream.finish is FinishReason.LENGTH
                assert len(stream.tokens) == stream.stopping.max_new_tokens
        engine.close()
        entries = read_log(log)
        assert entries.unfinished == set()
        assert len(entries.of("request")) == sum(entries.ends.values())
        assert not engine._driver._tasks
