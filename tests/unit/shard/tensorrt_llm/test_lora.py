"""LoRA adapters and cached tokens over the stand-in. With an adapter that is computed, its tokens come in the reverse order."""

from __future__ import annotations

import json
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
from lora_folder import an_adapter
from self_driver import SelfDriver
from standin import read_log
from trtllm_engines import Engines

from text_generation_common.lora import AdapterSource
from text_generation_proto.values import FailureCode
from text_generation_shard.adapters import LoraAdapter, read_adapter
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError

PROMPT = tuple(range(100, 180))
BACKWARDS = [*reversed(PROMPT)]


@pytest.fixture
def adapters(tmp_path: Path) -> str:
    """Two adapters, of different ranks and modules."""
    sql = an_adapter(tmp_path / "sql", 8)
    french = an_adapter(tmp_path / "french", 16, gate_proj=64, down_proj=256)
    return f"sql={sql},org/french={french}"


def test_each_sequence_is_computed_with_its_own_adapter(built: Engines, adapters: str, tmp_path: Path) -> None:
    engine = built(lora_adapters=adapters, log=tmp_path / "log")
    assert engine.info.adapters == ("sql", "org/french")
    driver = SelfDriver(engine)
    streams = [driver.admit(PROMPT, 3, adapter=adapter) for adapter in ("", "sql", "org/french", "", "sql")]
    unknown = driver.admit(PROMPT, 3, adapter="other")
    driver.run()
    assert [stream.tokens[0] for stream in streams] == [100, 179, 179, 100, 179]
    assert unknown.failure is not None
    assert (unknown.tokens, unknown.failure.code) == ([], FailureCode.INVALID)
    asked = [entry.get("lora") for entry in read_log(tmp_path / "log").of("request")]
    assert asked[:3] == [None, ["sql", 1, str(tmp_path / "sql")], ["org/french", 2, str(tmp_path / "french")]]


@pytest.mark.parametrize("given", [True, False])
def test_adapters_come_and_go_beside_running_sequences(built: Engines, tmp_path: Path, given: bool) -> None:
    modules = tmp_path / "modules"
    modules.mkdir()
    sql = an_adapter(tmp_path / "sql", 8)
    engine = built(
        lora_adapters=f"sql={sql}" if given else "", lora_modules_dir=str(modules), log=tmp_path / "log", step_ms=2
    )

    def read(name: str, folder: Path) -> LoraAdapter:
        return read_adapter(AdapterSource(name, str(folder)), ShardConfig(model_path=str(tmp_path / "model")))

    driver = SelfDriver(engine)
    running = driver.admit(PROMPT, 200)
    names = ("fr", "de")
    for name in names:
        folder = an_adapter(modules / name, 8, gate_proj=64, down_proj=256)
        change = engine.set_adapter(name, read(name, folder))
        for _ in change:
            driver.step()
    assert not running.is_over
    assert engine.info.adapters == (("sql",) if given else ()) + names
    streams = [driver.admit(PROMPT, 100, adapter=name) for name in names]
    leaving = engine.set_adapter("fr", None)
    driver.step()
    next(leaving)
    late = driver.admit(PROMPT, 2, adapter="fr")
    driver.run()
    assert list(leaving) == []
    assert late.failure is not None
    assert [stream.tokens for stream in streams] == [[*islice(cycle(BACKWARDS), 100)]] * 2

    # Another adapter under the name has a number of its own, so it finds none of its blocks.
    for _ in engine.set_adapter("fr", read("fr", an_adapter(modules / "other", 8))):
        driver.step()
    stream = driver.admit(PROMPT, 2, adapter="fr")
    driver.run()
    numbers = {entry["lora"][1] for entry in read_log(tmp_path / "log").of("request") if entry.get("lora")}
    assert (stream.tokens, len(numbers)) == (BACKWARDS[:2], 3 + given)
    for name, folder, problem in (
        ("rank", an_adapter(modules / "rank", 32), "has rank 32, and --max-lora-rank is"),
        ("fused", an_adapter(modules / "fused", 8, qkv_proj=64), "changes qkv_proj, and TensorRT-LLM serves adapters"),
    ):
        with pytest.raises(EngineError, match=problem):
            list(engine.set_adapter(name, read(name, folder)))
    broken = read("broken", modules / "other")
    (modules / "other/adapter_config.json").unlink()
    with pytest.raises(EngineError, match="the LoRA adapter broken: "):
        for _ in engine.set_adapter("broken", broken):
            driver.step()
    assert engine.info.adapters == (("sql",) if given else ()) + ("de", "fr")


def test_an_adapter_that_the_library_cannot_compute_is_refused_at_start(built: Engines, tmp_path: Path) -> None:
    folder = an_adapter(tmp_path / "experts", 8, w1=64)
    with pytest.raises(
        EngineError, match="the LoRA adapter moe changes w1, and TensorRT-LLM serves adapters of q_proj, "
    ):
        built(lora_adapters=f"moe={folder}")
    folder = an_adapter(tmp_path / "scaled", 8)
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"alpha_pattern": {"q_proj": 4}}))
    with pytest.raises(EngineError, match="the LoRA adapter a has alpha_pattern, which TensorRT-LLM leaves out"):
        built(lora_adapters=f"a={folder}")


def test_options_that_do_not_go_with_adapters(built: Engines, adapters: str, version: str) -> None:
    for options, refusal in (
        ("{enable_lora: true}", "enable_lora is not set here: use --lora-adapters"),
        ("{lora_config: {max_lora_rank: 8}}", "max_lora_rank is not set here: it follows from --lora-adapters"),
        ("{lora_config: 8}", "lora_config must be a mapping"),
    ):
        with pytest.raises(EngineError, match=refusal):
            built(lora_adapters=adapters, options=options)
    with pytest.raises(EngineError, match="lora_config is for --lora-adapters, which is missing"):
        built(options="{lora_config: {max_loras: 1}}")
    graphs = "{cuda_graph_config: {max_batch_size: 8}, lora_config: {max_loras: 1}}"
    if version == "1.2":
        with pytest.raises(EngineError, match="CUDA graphs of this version of TensorRT-LLM leave LoRA adapters out"):
            built(lora_adapters=adapters, options=graphs)
    else:
        driver = SelfDriver(built(lora_adapters=adapters, options=graphs))
        stream = driver.admit(PROMPT, 2, adapter="sql")
        driver.run()
        assert stream.tokens == BACKWARDS[:2]


def test_cached_tokens_are_reported_once(built: Engines, adapters: str) -> None:
    engine = built(lora_adapters=adapters)

    def cached(new: int, **options: Any) -> list[int]:  # noqa: ANN401
        driver = SelfDriver(engine)
        driver.admit(PROMPT, new, **options)
        driver.run()
        return [tokens for _, tokens in driver.cached]

    assert cached(4) == []
    assert cached(4) == [64], "two blocks of 32"
    assert cached(1) == [64]
    assert cached(4, adapter="sql") == []
    assert cached(4, adapter="sql") == [64]
    assert cached(4, adapter="org/french") == []
