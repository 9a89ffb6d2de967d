"""The quantization part of a config: supported schemes, and refusals by name."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from engine_driver import Driver
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
from tiny_quantized import quantized_model

from text_generation_proto.values import WarmUpLimits
from text_generation_shard.config import Quantize, ShardConfig
from text_generation_shard.engine import EngineError
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.layers.quantized.choice import projection_itemsize
from text_generation_shard.engines.torch.models.native.config import read_model_config
from text_generation_shard.engines.torch.weights.quantization.format import UnsupportedSchemeError, WeightFormat
from text_generation_shard.engines.torch.weights.quantization.formats.awq import AwqFormat
from text_generation_shard.engines.torch.weights.quantization.formats.float4 import Mxfp4Format, Nvfp4Format
from text_generation_shard.engines.torch.weights.quantization.formats.float8 import Fp8BlockFormat, Fp8Format
from text_generation_shard.engines.torch.weights.quantization.formats.gptq import GptqFormat
from text_generation_shard.engines.torch.weights.quantization.formats.packed_integers import (
    Int8Format,
    PackedIntegerFormat,
)
from text_generation_shard.engines.torch.weights.quantization.schemes import choose_scheme, online_fp8, read_scheme

GROUP = COMPRESSED_DYNAMIC["config_groups"]["group_0"]
STATIC = {"input_activations": ACTIVATIONS | {"strategy": "tensor", "dynamic": False}}
WHOLE = {"weights": GROUP["weights"] | {"strategy": "tensor"}}


def compressed(**changes: object) -> dict[str, Any]:
    config = copy.deepcopy(COMPRESSED_DYNAMIC)
    config["config_groups"]["group_0"] |= changes
    return config


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MODULE = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (COMPRESSED_DYNAMIC, Fp8Format(scale_per_row=True, static_inputs=False, in_scale_dtype=True)),
        (
            compressed(input_activations=None),
            Fp8Format(scale_per_row=True, static_inputs=False, in_scale_dtype=True, weight_only=True),
        ),
        (compressed(**WHOLE), Fp8Format(scale_per_row=False, static_inputs=False, in_scale_dtype=True)),
        (compressed(**WHOLE, **STATIC), Fp8Format(scale_per_row=False, static_inputs=True, in_scale_dtype=True)),
        (compressed(weights=INT4, input_activations=None), PackedIntegerFormat(4, 128, symmetric=True)),
        (compressed(weights=INT4 | {"num_bits": 8, "strategy": "channel"}), Int8Format(-1, symmetric=True)),
        (compressed(weights=NVFP4), Nvfp4Format(modelopt=False)),
        (compressed(weights=NVFP4 | {"strategy": "group", "group_size": 32}), Mxfp4Format()),
        (MODELOPT_STATIC, Fp8Format(scale_per_row=False, static_inputs=True)),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, Nvfp4Format(modelopt=True)),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, Fp8BlockFormat((128, 128))),
        (
            {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
            Fp8Format(scale_per_row=False, static_inputs=True),
        ),
        (GPTQ, GptqFormat(4, 128, zero_offset=True, symmetric=True, desc_act=False)),
        (
            GPTQ | {"bits": 8, "group_size": -1, "sym": False, "desc_act": True, "checkpoint_format": "gptq_v2"},
            GptqFormat(8, -1, zero_offset=False, symmetric=False, desc_act=True),
        ),
        (AWQ, AwqFormat(4, 128, symmetric=False)),
        ({"quant_method": "mxfp4"}, None),
    ],
    ids=str,
)
def test_schemes(config: dict[str, Any], expected: WeightFormat | None) -> None:
    assert read_scheme(config).format_of(MODULE) == expected


def test_groups_of_compressed_tensors_have_their_own_modules() -> None:
    groups = {"rest": GROUP, "down": {"targets": ["re:.*down_proj"], "weights": INT4, "format": "pack-quantized"}}
    scheme = read_scheme(COMPRESSED_DYNAMIC | {"config_groups": groups, "format": "mixed-precision"})
    assert isinstance(scheme.format_of(MODULE), PackedIntegerFormat)
    assert isinstance(scheme.format_of("model.layers.0.mlp.up_proj"), Fp8Format)
    assert scheme.format_of("lm_head") is None


def test_gptq_may_name_its_modules() -> None:
    scheme = read_scheme(GPTQ | {"modules_in_block_to_quantize": [["mlp.up_proj", "mlp.gate_proj"], ["mlp.down_proj"]]})
    assert isinstance(scheme.format_of(MODULE), GptqFormat)
    assert scheme.format_of("model.layers.0.self_attn.q_proj") is None


def test_compressed_tensors_may_have_scales_of_the_cache_alone() -> None:
    scheme = read_scheme({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": ACTIVATIONS})
    assert scheme.format_of(MODULE) is None
    assert scheme.label == "compressed-tensors (KV cache)"
    assert projection_itemsize(scheme, 2) == 2
    with pytest.raises(UnsupportedSchemeError, match="is quantized as"):
        choose_scheme(scheme, "fp8")


@pytest.mark.parametrize(
    ("before", "counts"),
    [
        (["re:.*_proj"], [MODULE]),
        (["re:.*mlp.*_proj"], ["re:.*down_proj"]),
        (["re:.*up_proj", "Linear"], ["re:.*_proj"]),
        (["Linear"], ["lm_head", MODULE]),
    ],
)
def test_the_most_precise_target_of_all_groups_counts(before: list[str], counts: list[str]) -> None:
    """As in the library: names, then expressions in the order of their text, then classes; it writes groups in any order."""
    groups = {"a": GROUP | {"targets": before}, "b": {"targets": counts, "weights": INT4}}
    for order in (groups, dict(reversed(groups.items()))):
        scheme = read_scheme(COMPRESSED_DYNAMIC | {"config_groups": order, "format": "mixed-precision"})
        assert isinstance(scheme.format_of(MODULE), PackedIntegerFormat)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("int8", "quantized checkpoints (int8)"),
        ({"quant_method": "aqlm"}, "(aqlm) are not supported, only fp8, gptq, awq"),
        ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "int4"}, "bitsandbytes: int4 is not supported"),
        ({"quant_method": "bitsandbytes", "bnb_4bit_quant_storage": "bfloat16"}, "bitsandbytes: codes in bfloat16"),
        ({"quant_method": ["gptq"]}, "quantized checkpoints (['gptq'])"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is [128]"),
        ({"quant_method": "fp8", "weight_block_size": [0, -1]}, "weight_block_size is [0, -1]"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8: fmt e5m2"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "(modelopt, W4A16_AWQ)"),
        (GPTQ | {"bits": 3}, "gptq: weights of 3 bits"),
        (GPTQ | {"bits": 4.0}, "gptq: weights of 4.0 bits"),
        (GPTQ | {"bits": "4\n5"}, "gptq: weights of '4\\n5' bits"),
        (GPTQ | {"checkpoint_format": {"a": 1}}, "checkpoint_format {'a': 1}"),
        (GPTQ | {"group_size": 0}, "gptq: group_size 0"),
        (GPTQ | {"group_size": 1 << 70}, "gptq: group_size 1180591620717411303424"),
        (GPTQ | {"group_size": "128"}, "gptq: group_size 128 is not supported"),
        (GPTQ | {"modules_in_block_to_quantize": ["q_proj"]}, "modules_in_block_to_quantize is not a list of lists"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        (GPTQ | {"dynamic": {"+:.*": {"bits": 8}}}, "gptq: dynamic"),
        (AWQ | {"version": "gemv"}, "awq: version gemv"),
        (AWQ | {"bits": 8}, "awq: weights of 8 bits"),
        ({"quant_method": "compressed-tensors"}, "config_groups must be an object"),
        (COMPRESSED_DYNAMIC | {"config_groups": dict.fromkeys("abcdefghijklmnopq", GROUP)}, "of 1 to 16 groups"),
        (COMPRESSED_DYNAMIC | {"config_groups": {"a": {"weights": INT4}}}, "without targets"),
        (COMPRESSED_DYNAMIC | {"format": "marlin-24"}, "format marlin-24"),
        (COMPRESSED_DYNAMIC | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (compressed(weights=INT4 | {"num_bits": 3}), "int3 by group of 128"),
        (compressed(weights=INT4 | {"strategy": "tensor"}), "int4 by tensor"),
        (compressed(weights=GROUP["weights"] | {"strategy": "block"}), "block_structure is None"),
        (compressed(weights=NVFP4 | {"group_size": 32}), "only NVFP4 and MXFP4"),
        (compressed(input_activations={"num_bits": 8, "type": "int"}), "activations int8 by None"),
        (compressed(input_activations=ACTIVATIONS | {"strategy": "group", "dynamic": True}), "float8 by group"),
        (compressed(input_activations=ACTIVATIONS | {"strategy": "token", "dynamic": False}), "float8 by token"),
        (compressed(output_activations=ACTIVATIONS), "output_activations"),
        (COMPRESSED_DYNAMIC | {"transform_config": {"config_groups": {}}}, "transform_config"),
        (COMPRESSED_DYNAMIC | {"ignore": "lm_head"}, "must be a list of names"),
        (COMPRESSED_DYNAMIC | {"ignore": ["re:("]}, "not a regular expression"),
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
    scheme = read_scheme(COMPRESSED_DYNAMIC | {"ignore": ["other", pattern]})
    assert (scheme.format_of(MODULE) is not None) is covers


@pytest.mark.parametrize(
    ("name", "covers"),
    [("mlp", False), ("model.layers.0", False), ("down", True), ("layers.1", True), ("mlp.down_proj", False)],
)
def test_modules_to_not_convert_are_parts_of_names(name: str, covers: bool) -> None:
    scheme = read_scheme(AWQ | {"modules_to_not_convert": [name]})
    assert (scheme.format_of(MODULE) is not None) is covers


IN_TEXT_PART = [
    MODULE.replace("model.", prefix) for prefix in ("model.language_model.", "language_model.model.", "backbone.")
]


@pytest.mark.parametrize("module", [MODULE, *IN_TEXT_PART])
@pytest.mark.parametrize(
    "pattern", [*IN_TEXT_PART, IN_TEXT_PART[0].replace("proj", "*"), r"re:.*language_model.*down.*"]
)
def test_a_text_part_may_have_its_prefix_in_the_config_and_in_the_checkpoint(pattern: str, module: str) -> None:
    assert read_scheme(COMPRESSED_DYNAMIC | {"ignore": [pattern]}).format_of(module) is None
    assert read_scheme(AWQ | {"modules_to_not_convert": [pattern]}).format_of(module) is None
    assert read_scheme({"quant_algo": "FP8", "exclude_modules": [pattern]}).format_of(module) is None
    target = read_scheme(compressed(targets=[pattern]))
    assert target.format_of(module) is not None
    assert target.format_of(module.replace("down", "up")) is None


def test_an_expression_that_matches_for_ever_ends_the_start_in_one_line() -> None:
    scheme = read_scheme(COMPRESSED_DYNAMIC | {"ignore": [r"re:(.|.)*\d\d"]})
    with pytest.raises(EngineError, match="takes too long to match"):
        scheme.format_of("model.layers.0.self_attention_of_a_long_name.down_projection")


SERVED: dict[str, dict[str, Any]] = {
    "gptq": GPTQ,
    "awq": AWQ,
    "compressed-tensors": compressed(weights=INT4),
    "compressed-tensors, fp8": COMPRESSED_DYNAMIC,
    "fp8": {"quant_method": "fp8", "weight_block_size": [48, 48]},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}
BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}
SERVED |= {
    f"bitsandbytes, bitsandbytes-{kind}": BITSANDBYTES | {"bnb_4bit_quant_type": kind} for kind in ("nf4", "fp4")
}
SERVED["bitsandbytes"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
NOT_SERVED = {"exl2": {"quant_method": "exl2"}}


@pytest.mark.parametrize("asked", get_args(Quantize))
def test_each_value_of_the_flag_is_served_or_refused_by_name(tmp_path: Path, asked: str) -> None:
    for kind, found in {"no quantization": None, **SERVED, **NOT_SERVED}.items():
        folder = write(tmp_path, {"quantization_config": found})
        if asked in kind.split(", "):
            words = f"({asked}) are not supported" if kind in NOT_SERVED else ""
        elif found is None:
            words = "" if asked == "fp8" else f"--quantize {asked}: the checkpoint is not quantized, only fp8 is done"
        elif kind in NOT_SERVED:
            words = f"({kind}) are not supported"
        else:
            words = f"--quantize {asked}: the checkpoint is quantized as {found['quant_method']}"
        if words:
            with pytest.raises(EngineError, match=re.escape(words)):
                read_model_config(folder, asked)
        elif found is None:
            assert read_model_config(folder, asked).quantization == online_fp8()
        else:
            assert read_model_config(folder, asked) == read_model_config(folder)


def write(folder: Path, config: dict[str, Any], modelopt: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    if modelopt is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(modelopt))
    return folder


def test_no_quantization_is_none(tmp_path: Path) -> None:
    assert read_model_config(write(tmp_path, {"quantization_config": None})).quantization is None


def test_modelopt_has_its_own_config_file(tmp_path: Path) -> None:
    given = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    config = read_model_config(write(tmp_path, {}, {"producer": {"name": "modelopt"}, "quantization": given}))
    assert config.quantization == read_scheme(MODELOPT_STATIC)


MODELOPT_4_BITS = {"quantization": {"quant_algo": "W4A16_AWQ"}}


@pytest.mark.parametrize(
    ("config", "modelopt", "refusal"),
    [
        ({"quantization_config": {"quant_method": "aqlm"}}, None, "config.json: quantized checkpoints (aqlm)"),
        ({}, MODELOPT_4_BITS, "hf_quant_config.json: quantized checkpoints (modelopt, W4A16_AWQ)"),
    ],
)
def test_a_refusal_names_the_file(
    tmp_path: Path, config: dict[str, Any], modelopt: dict[str, Any] | None, refusal: str
) -> None:
    with pytest.raises(EngineError, match=re.escape(refusal)):
        read_model_config(write(tmp_path, config, modelopt))


def tokens_of(folder: Path, dtype: str, quantize: str | None = None) -> list[int]:
    engine = build_engine(
        ShardConfig(model_path=str(folder), device="cpu", max_batch_size=4, dtype=dtype, quantize=quantize)
    )  # type: ignore[arg-type]
    return Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=512))).alone((5, 17, 300), 16)


def test_rows_are_quantized_at_load_time_as_by_the_tool(tmp_path: Path) -> None:
    """--quantize fp8 serves the same as a checkpoint whose rows were quantized before; embeddings and LM head stay."""
    tensors = random_tensors()
    plain = write_checkpoint(tmp_path / "plain", tensors)
    before = write_checkpoint(tmp_path / "before", dequantized(quantized(tensors, per_row=True)))
    assert tokens_of(plain, "float32", "fp8") == tokens_of(before, "float32") != tokens_of(plain, "float32")


@pytest.mark.parametrize("name", ["fp8 by row", "awq"])
def test_a_cpu_serves_dequantized_weights(tmp_path: Path, name: str) -> None:
    """Weights are dequantized at load; activations are not quantized."""
    if name == "awq":
        config, stored, dense = quantized_model(random_tensors())
    else:
        config, stored = COMPRESSED_DYNAMIC, quantized(random_tensors(), per_row=True)
        dense = dequantized(stored)
    packed = write_checkpoint(tmp_path / "packed", stored, {"quantization_config": config})
    plain = write_checkpoint(tmp_path / "plain", dense)
    for dtype in ("float32", "bfloat16"):
        tokens = tokens_of(packed, dtype)
        assert tokens == tokens_of(plain, dtype)
        assert len(set(tokens)) > 1
