"""LoRA adapters: TGI's grammar of the setting, and the check of their folders before a model is loaded."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from text_generation_common.lora import MAX_ADAPTERS, AdapterSource, adapters_to_text, parse_adapters
from text_generation_shard.adapters import read_adapters
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError

MODEL = {"hidden_size": 64, "num_hidden_layers": 2}
LAYER = "base_model.model.model.layers.1.self_attn.q_proj.lora_"
WEIGHTS = {f"{LAYER}A.weight": (8, 64), f"{LAYER}B.weight": (64, 8)}
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj"],
    "bias": "none",
    "modules_to_save": None,
    "base_model_name_or_path": "org/base",
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("org/sql", [("org/sql", "org/sql", "")]),
        ("org/sql@v1, b=/models/b", [("org/sql", "org/sql", "v1"), ("b", "/models/b", "")]),
        ("b=/models/b@main,", [("b", "/models/b", "main")]),
    ],
)
def test_the_grammar_is_tgis(text: str, expected: list[tuple[str, str, str]]) -> None:
    assert parse_adapters(text) == tuple(AdapterSource(*each) for each in expected)
    local = tuple(AdapterSource(name, "/a") for name, _, _ in expected)
    assert parse_adapters(adapters_to_text(local)) == local


TOO_MANY = ",".join(map(str, range(MAX_ADAPTERS + 1)))


@pytest.mark.parametrize(
    "text",
    ["a=b=c", "a@1@2", "=b", "@1", "a=", "a@", "a@1=b", "a,a", "a,tgi", "a\nb", "x" * 300, TOO_MANY],
    ids=lambda text: text[:10],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="LoRA adapter"):
        parse_adapters(text)


def a_folder(path: Path, config: object = CONFIG, weights: dict[str, tuple[int, ...]] | None = WEIGHTS) -> ShardConfig:
    (path / "config.json").write_text(json.dumps(MODEL))
    adapter = path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if weights is not None:
        save_file(
            {key: np.zeros(shape, dtype=np.float32) for key, shape in weights.items()},
            adapter / "adapter_model.safetensors",
        )
    return ShardConfig(model_path=str(path), model_id="org/base", lora_adapters=f"sql={adapter}")


def test_a_named_pipe_in_place_of_the_weights_is_refused(tmp_path: Path) -> None:
    """To open it would wait for a writer."""
    config = a_folder(tmp_path, weights=None)
    os.mkfifo(tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(EngineError, match=r"adapter_model\.safetensors cannot be read: it is not a file"):
        read_adapters(config)


def test_an_adapter_is_read_with_its_largest_rank(tmp_path: Path) -> None:
    other = "base_model.model.model.layers.0.mlp.down_proj.lora_"
    weights = WEIGHTS | {f"{other}A.weight": (16, 256), f"{other}B.weight": (64, 16)}
    [adapter] = read_adapters(a_folder(tmp_path, weights=weights))
    assert (adapter.name, adapter.folder) == ("sql", tmp_path / "adapter")
    assert (adapter.rank, adapter.modules) == (16, {"q_proj", "down_proj"})


@pytest.mark.parametrize(
    "settings",
    [
        {"layers_to_transform": [1], "layers_pattern": "layers"},
        {"base_model_name_or_path": ""},
        {"init_lora_weights": "gaussian"},
    ],
)
def test_keys_that_only_training_needs_are_accepted(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The file has the matrices of the layers that were chosen. PEFT writes an empty name for a model without one."""
    [adapter] = read_adapters(a_folder(tmp_path, CONFIG | settings))
    assert adapter.modules == {"q_proj"}


@pytest.mark.parametrize(
    ("expected", "config", "weights"),
    [
        ("r is missing", {"r": None}, WEIGHTS),
        ("r is 'a'", {"r": "a"}, WEIGHTS),
        ("r is 4096", {"r": 4096}, WEIGHTS),
        ("lora_alpha is missing", {"lora_alpha": None}, WEIGHTS),
        ("target_modules is missing", {"target_modules": []}, WEIGHTS),
        ("base_model_name_or_path is 7", {"base_model_name_or_path": 7}, WEIGHTS),
        ("peft_type is IA3", {"peft_type": "IA3"}, WEIGHTS),
        ("biases", {"bias": "all"}, WEIGHTS),
        ("modules_to_save", {"modules_to_save": ["lm_head"]}, WEIGHTS),
        ("DoRA", {"use_dora": True}, WEIGHTS),
        ("alpha_pattern has '(q': missing )", {"alpha_pattern": {"(q": 4}}, WEIGHTS),
        ("regex timed out", {"alpha_pattern": {r"(.|.)*\d\d": 4}}, WEIGHTS),
        ("lora_alpha is 'a'", {"alpha_pattern": {"q_proj": "a"}}, WEIGHTS),
        ("init_lora_weights is 'pissa_niter_4'", {"init_lora_weights": "pissa_niter_4"}, WEIGHTS),
        ("init_lora_weights is 'olora'", {"init_lora_weights": "OLoRA"}, WEIGHTS),
        ("r is 'a'", {"rank_pattern": {"q_proj": "a"}}, WEIGHTS),
        ("target_parameters", {"target_parameters": ["mlp.experts.down_proj"]}, WEIGHTS),
        ("rank 8 and lora_B of rank 4", {}, WEIGHTS | {f"{LAYER}B.weight": (64, 4)}),
        ("no JSON", "{", WEIGHTS),
        ("has no adapter_model.safetensors", {}, None),
        ("holds no weights", {}, {}),
        ("has lora_A only", {}, {f"{LAYER}A.weight": (8, 64)}),
        ("hidden_size 128, and this one has 64", {}, {f"{LAYER}A.weight": (8, 128), f"{LAYER}B.weight": (64, 8)}),
        ("more layers than the 2", {}, {key.replace("layers.1", "layers.2"): shape for key, shape in WEIGHTS.items()}),
        ("not a weight of a LoRA adapter", {}, WEIGHTS | {"base_model.model.lm_head.weight": (9, 64)}),
        ("not a weight of a LoRA adapter", {}, WEIGHTS | {"base_model.model.lm_head.base_layer.weight": (9, 64)}),
        ("trained tokens", {"trainable_token_indices": [7]}, WEIGHTS),
        ("is of a tower", {}, {key.replace("model.layers", "visual.layers"): shape for key, shape in WEIGHTS.items()}),
        ("is not a matrix", {}, {f"{LAYER}A.weight": (8,)}),
    ],
)
def test_a_wrong_adapter_is_one_line(tmp_path: Path, expected: str, config: object, weights: Any) -> None:  # noqa: ANN401
    settings = config if isinstance(config, str) else CONFIG | dict(config)  # type: ignore[call-overload]
    with pytest.raises(EngineError) as refused:
        read_adapters(a_folder(tmp_path, settings, weights))
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("damage", [b"", b"\0" * 8, b"\xff" * 64, (2).to_bytes(8, "little") + b"[]"])
def test_a_damaged_file_is_one_line(tmp_path: Path, damage: bytes) -> None:
    config = a_folder(tmp_path)
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(damage)
    with pytest.raises(EngineError, match="is not a safetensors file"):
        read_adapters(config)
    (tmp_path / "adapter" / "adapter_config.json").unlink()
    with pytest.raises(EngineError, match=r"the LoRA adapter sql: .* has no adapter_config.json"):
        read_adapters(config)


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, 2),
        ({"use_rslora": True}, 16 / 8**0.5),
        ({"alpha_pattern": {"k_proj": 3, "q_proj": 4}}, 0.5),
        ({"alpha_pattern": {"self_attn.q_proj": 4, "q_proj": 3}}, 0.5),
        ({"alpha_pattern": {"^q_proj": 4, "^model.layers.1.self_attn.q_proj": 8}}, 1),
        ({"alpha_pattern": {"_proj": 4}}, 2),
        ({"rank_pattern": {"k_proj": 2, "q_proj": 4}}, 4),
        ({"rank_pattern": {"self_attn.q_proj": 4, "q_proj": 2}, "use_rslora": True}, 8),
        ({"alpha_pattern": {r".*layers\.[1-3]\..*_proj": 4}}, 0.5),
    ],
)
def test_scales_are_those_of_peft(tmp_path: Path, settings: dict[str, Any], scale: float) -> None:
    [adapter] = read_adapters(a_folder(tmp_path, CONFIG | settings))
    [change] = adapter.changes.values()
    assert change.scale == pytest.approx(scale)


def test_each_module_may_have_a_pattern_of_its_own(tmp_path: Path) -> None:
    """EVA writes hundreds, each of which is compiled once."""
    modules = [f"model.layers.1.module{number}" for number in range(100)]
    weights = {
        f"base_model.model.{name}.lora_{side}.weight": shape
        for name in modules
        for side, shape in (("A", (8, 4)), ("B", (4, 8)))
    }
    others = {f"model.layers.0.module{number}": 1 for number in range(600)}
    config = a_folder(tmp_path, CONFIG | {"alpha_pattern": others | dict.fromkeys(modules, 4)}, weights)
    start = time.process_time()
    [adapter] = read_adapters(config)
    assert time.process_time() - start < 3
    assert {change.scale for change in adapter.changes.values()} == {0.5}
