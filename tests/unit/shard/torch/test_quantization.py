"""The quantization part of a config: supported schemes, and refusals by name."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from engine_driver import Driver
from structlog.testing import capture_logs
from tiny_checkpoint import (
    ACTIVATIONS,
    COMPRESSED_DYNAMIC,
    CONFIG,
    MODELOPT_STATIC,
    dequantized,
    quantized,
    random_tensors,
    write_checkpoint,
)

from text_generation_proto.values import WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.model.config import read_model_config
from text_generation_shard.engines.torch.quantization.schemes import Fp8Scheme, UnsupportedSchemeError, read_scheme

GROUP = COMPRESSED_DYNAMIC["config_groups"]["group_0"]
STATIC = {"input_activations": ACTIVATIONS | {"strategy": "tensor", "dynamic": False}}
WHOLE = {"weights": GROUP["weights"] | {"strategy": "tensor"}}


def compressed(**changes: object) -> dict[str, Any]:
    config = copy.deepcopy(COMPRESSED_DYNAMIC)
    config["config_groups"]["group_0"] |= changes
    return config


@pytest.mark.parametrize(
    ("config", "per_row", "static", "ignored"),
    [
        (COMPRESSED_DYNAMIC, True, False, ("lm_head",)),
        (compressed(**WHOLE), False, False, ("lm_head",)),
        (compressed(**WHOLE, **STATIC), False, True, ("lm_head",)),
        (MODELOPT_STATIC, False, True, ("lm_head",)),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["a", "b"]}, False, True, ("a", "b")),
    ],
    ids=str,
)
def test_schemes(config: dict[str, Any], per_row: bool, static: bool, ignored: tuple[str, ...]) -> None:
    assert read_scheme(config) == Fp8Scheme(per_row, static, ignored)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("int8", "quantized checkpoints (int8)"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "(fp8) are not supported, only FP8 of"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "(modelopt, NVFP4)"),
        ({"quant_method": "compressed-tensors"}, "only one config group"),
        (COMPRESSED_DYNAMIC | {"config_groups": {"a": GROUP, "b": GROUP}}, "only one config group"),
        (compressed(targets=["re:.*mlp.*"]), "only one config group, of all Linear"),
        (compressed(weights=GROUP["weights"] | {"num_bits": 4, "type": "int"}), "weights int4 by channel"),
        (compressed(weights=GROUP["weights"] | {"strategy": "block"}), "weights float8 by block"),
        (compressed(input_activations=None), "activations None"),
        (compressed(input_activations=ACTIVATIONS | {"strategy": "group", "dynamic": True}), "float8 by group"),
        (compressed(input_activations=ACTIVATIONS | {"strategy": "token", "dynamic": False}), "float8 by token"),
        (compressed(output_activations=ACTIVATIONS), "output_activations"),
        (COMPRESSED_DYNAMIC | {"transform_config": {"config_groups": {}}}, "transform_config"),
        (COMPRESSED_DYNAMIC | {"ignore": "lm_head"}, "must be a list of names"),
        (COMPRESSED_DYNAMIC | {"ignore": ["re:("]}, "no regular expression"),
        (COMPRESSED_DYNAMIC | {"ignore": ["re:.*"] * 17}, "at most 16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_schemes_are_refused_by_name(config: object, message: str) -> None:
    with pytest.raises(UnsupportedSchemeError) as refusal:
        read_scheme(config)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("pattern", "covers"),
    [
        ("lm_head", True),
        ("model.layers.0.mlp.down_proj", False),
        ("model.layers.0.mlp", True),
        ("model.layers.0.*", False),
        ("*.down_proj", False),
        ("re:.*down_proj", False),
        (r"re:^model\.layers\.(0|1|31)\..*(mlp|attn).*_proj$", False),
        ("re:.*layers\\.1\\..*", True),
        (r"re:^(?!.*lm_head).*_proj$", False),
    ],
)
def test_modules_are_ignored_by_name_pattern_or_expression(pattern: str, covers: bool) -> None:
    scheme = Fp8Scheme(scale_per_row=True, static_inputs=False, ignored=("other", pattern))
    assert scheme.covers("model.layers.0.mlp.down_proj") is covers


def test_an_expression_that_matches_for_ever_ends_the_start_in_one_line() -> None:
    scheme = Fp8Scheme(scale_per_row=True, static_inputs=False, ignored=(r"re:(.|.)*\d\d",))
    with pytest.raises(EngineError, match="takes too long to match"):
        scheme.covers("model.layers.0.self_attention_of_a_long_name.down_projection")


def write(folder: Path, config: dict[str, Any], modelopt: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    if modelopt is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(modelopt))
    return folder


def test_no_quantization_is_none(tmp_path: Path) -> None:
    assert read_model_config(write(tmp_path, {"quantization_config": None})).quantization is None


def test_modelopt_has_its_own_config_file(tmp_path: Path) -> None:
    given = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    with capture_logs() as logs:
        config = read_model_config(write(tmp_path, {}, {"producer": {"name": "modelopt"}, "quantization": given}))
    assert config.quantization == read_scheme(MODELOPT_STATIC)
    assert [(line["event"], line["checkpoint_asks"]) for line in logs] == [("the KV cache is not quantized", "FP8")]


MODELOPT_4_BITS = {"quantization": {"quant_algo": "W4A16_AWQ"}}


@pytest.mark.parametrize(
    ("config", "modelopt", "refusal"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, None, "config.json: quantized checkpoints (awq)"),
        ({}, MODELOPT_4_BITS, "hf_quant_config.json: quantized checkpoints (modelopt, W4A16_AWQ)"),
    ],
)
def test_a_refusal_names_the_file(
    tmp_path: Path, config: dict[str, Any], modelopt: dict[str, Any] | None, refusal: str
) -> None:
    with pytest.raises(EngineError, match=re.escape(refusal)):
        read_model_config(write(tmp_path, config, modelopt))


def test_a_cpu_serves_dequantized_weights(tmp_path: Path) -> None:
    """Weights are dequantized at load; activations are not quantized."""
    tensors = quantized(random_tensors(), per_row=True)
    tokens = []
    for folder in (
        write_checkpoint(tmp_path / "fp8", tensors, {"quantization_config": COMPRESSED_DYNAMIC}),
        write_checkpoint(tmp_path / "plain", dequantized(tensors)),
    ):
        engine = build_engine(ShardConfig(model_path=str(folder), device="cpu", max_batch_size=4))
        driver = Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=512)))
        tokens.append(driver.alone((5, 17, 300), 16))
    assert tokens[0] == tokens[1]
    assert len(set(tokens[0])) > 1
