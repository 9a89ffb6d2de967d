"""Planted faults: wrong text that a server may serve unnoticed is found by audits, and the right feature is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from audited_traffic import Audited, audited
from byte_tokenizer import write_tokenizer
from faulty_torch import FAULTS, Fault, FaultyTorch
from structlog.testing import capture_logs
from tiny_engines import TINY_LLAMA

from text_generation_proto.values import WarmUpLimits
from text_generation_shard.config import ShardConfig

MOST_AUDITS = 200
SMALL_POOL = 320
"""Tokens of KV cache that the requests of a burst do not fit: some are preempted."""


@pytest.fixture(params=["tiny", pytest.param("demo", marks=pytest.mark.full)])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Folder of a model of random weights, or of SmolLM2."""
    if request.param == "demo":
        folder: Path = request.getfixturevalue("demo_model")
        return folder
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    write_tokenizer(tmp_path)
    return tmp_path


def engine(model: Path, fault: Fault | None, dtype: str = "float32") -> FaultyTorch:
    load_format = "auto" if (model / "model.safetensors").exists() else "dummy"
    config = ShardConfig(
        engine="torch",
        model_path=str(model),
        load_format=load_format,
        device="cpu",
        dtype=dtype,
        max_batch_size=16,
        speculate="8" if fault == "draft" else "0",  # steps with drafts depend on measured times
    )
    return FaultyTorch(config, fault)


async def burst(server: Audited, number: int, feature: str) -> None:
    """Send requests of which some use the feature."""
    preempts = feature == "preemption"
    await server.burst(6 if preempts else 9, 80 if preempts else 24, loses=number % 2 if feature == "move" else None)


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_planted_fault_is_found_and_its_feature_is_named(
    model: Path, tmp_path: Path, fault: Fault, record_property: Callable[[str, object], None]
) -> None:
    feature = FAULTS[fault]
    engines = [engine(model, fault) for _ in range(2 if feature == "move" else 1)]
    limits = WarmUpLimits(256, 0, SMALL_POOL if feature == "preemption" else 4096)
    first = bursts = 0
    async with audited(engines, tmp_path, limits=limits) as server:
        while len(server.events) < 5 and server.audited < MOST_AUDITS:
            await burst(server, bursts, feature)
            bursts += 1
            first = first or (server.audited if server.events else 0)
        strikes = sum(each.strikes for each in engines)
        assert 0 < first <= MOST_AUDITS, f"not found after {server.audited} audits and {strikes} strikes"
        assert server.suspect == feature
        assert server.auditor.verdicts["failed"] == 0
    record_property("bar", f"audits: {model.name} {fault} found after {first} audits, named {server.suspect}")


async def test_sound_engines_raise_no_alarm(model: Path, tmp_path: Path) -> None:
    engines = [engine(model, None) for _ in range(2)]
    async with audited(engines, tmp_path, limits=WarmUpLimits(256, 0, SMALL_POOL)) as server:
        await server.burst(8, 130)  # two of them do not fit the pool
        await server.burst(9, loses=1)
        stats = server.cluster.scheduler.stats()
        assert stats.preemptions > 0
        assert stats.moves > 0
        assert server.auditor.verdicts["same"] == server.audited == len(server.submitted), server.events


async def test_the_bound_of_rounded_types_is_measured_at_the_start(model: Path, tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with audited([engine(model, None, "bfloat16")], tmp_path) as server:
            await server.idle()
            assert not server.auditor.verdicts
            await server.burst(4)
    (line,) = (each for each in logs if each["event"] == "bound of audits measured")
    assert line["dtype"] == "bfloat16"
    assert 0.25 <= line["nats"] <= 1.0  # eight times the largest difference: up to 0.57 was seen
    assert server.auditor.verdicts["same"] == server.audited == len(server.submitted), server.events
