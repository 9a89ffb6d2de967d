"""Weights of quantized checkpoints, against the libraries of their formats (tests/corpus/quantized)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from structlog.testing import capture_logs
from tiny_checkpoint import COMPRESSED_DYNAMIC
from torch import Tensor

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.layers.linear import Projection
from text_generation_shard.engines.torch.layers.precision import Precision
from text_generation_shard.engines.torch.layers.quantized.fp8 import Fp8Linear
from text_generation_shard.engines.torch.layers.quantized.packed_format import (
    bits_and_group,
    dense_weight,
    packed_codes,
    packed_parameters,
    packed_scales,
    packed_zeros,
    reorder_outputs,
)
from text_generation_shard.engines.torch.models.huggingface.dequantize import dequantized_tensors
from text_generation_shard.engines.torch.models.native.projections import LayerProjections
from text_generation_shard.engines.torch.parallel.tensor_parallel import ShardRange, TensorParallelRank
from text_generation_shard.engines.torch.weights.checkpoint import Checkpoint
from text_generation_shard.engines.torch.weights.load import load_weights
from text_generation_shard.engines.torch.weights.parameter import ParameterShard
from text_generation_shard.engines.torch.weights.quantization.format import UnsupportedSchemeError
from text_generation_shard.engines.torch.weights.quantization.formats.float4 import GptOssMxfp4Format, Mxfp4Format
from text_generation_shard.engines.torch.weights.quantization.formats.float8 import Fp8Format, quantized_rows
from text_generation_shard.engines.torch.weights.quantization.formats.gptq import GptqFormat
from text_generation_shard.engines.torch.weights.quantization.schemes import Scheme, online_fp8, read_scheme

CORPUS = Path(__file__).parents[3] / "corpus" / "quantized"
CASES = sorted(path.stem for path in CORPUS.glob("*.safetensors"))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def case(name: str) -> tuple[Scheme, dict[str, Tensor], Tensor, str]:
    """Return the scheme, the tensors, the library's weight, and the name of the parameter."""
    with safe_open(CORPUS / f"{name}.safetensors", framework="pt") as file:
        config = json.loads(file.metadata()["quantization_config"])
        tensors = {key: file.get_tensor(key) for key in file.keys() if key != "expected"}  # noqa: SIM118
        expected = file.get_tensor("expected")
    parameter = "m.experts.gate_up_proj" if name == "mxfp4-experts" else "m.weight"
    return read_scheme(config), tensors, expected, parameter


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_equal_the_library_s_to_the_bit(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    scheme, tensors, expected, parameter = case(name)
    save_file(tensors, tmp_path / "model.safetensors")
    whole = torch.full(expected.shape, float("nan"), dtype=dtype)
    load_weights(tmp_path, {parameter: whole}, scheme)
    assert torch.equal(whole, expected.to(dtype))
    if parameter == "m.weight":
        found = dequantized_tensors(Checkpoint(tmp_path), scheme, dtype)
        assert found.keys() == {parameter}
        assert torch.equal(found[parameter], whole), "for a model that transformers runs"
    # A rank's part, which begins and ends within words, groups and blocks.
    starts, sizes = [size // 3 + 1 for size in expected.shape], [size // 3 for size in expected.shape]
    part = torch.full(sizes, float("nan"), dtype=dtype)
    load_weights(tmp_path, {parameter: ParameterShard(part, tuple(expected.shape), tuple(starts))}, scheme)
    inside = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
    assert torch.equal(part, expected[inside].to(dtype))


def test_groups_of_compressed_tensors_in_another_order(tmp_path: Path) -> None:
    """weight_g_idx, which the library wrote until 2026: both groups exchanged, and their scales with them."""
    scheme, tensors, expected, parameter = case("compressed-tensors-pack-int4")
    tensors["m.weight_scale"] = tensors["m.weight_scale"].flip(1).contiguous()
    tensors["m.weight_g_idx"] = (1 - torch.arange(64) // 32).int()
    save_file(tensors, tmp_path / "model.safetensors")
    whole = torch.zeros(expected.shape)
    load_weights(tmp_path, {parameter: whole}, scheme)
    assert torch.equal(whole, expected.float())


def test_one_line_says_that_weights_are_dequantized(tmp_path: Path) -> None:
    scheme, tensors, expected, parameter = case("gptq-int4")
    plain = {"norm.weight": torch.ones(4), "lm_head.weight": torch.ones(8, 4)}
    save_file(tensors | plain, tmp_path / "model.safetensors")
    parameters = {
        parameter: torch.zeros(expected.shape),
        "norm.weight": torch.zeros(4),
        "lm_head.weight": torch.zeros(8, 4),
    }
    with capture_logs() as logs:
        load_weights(tmp_path, parameters, scheme)
    told = [line for line in logs if line["event"] == "weights are dequantized while they are loaded"]
    assert [(line["format"], line["dtype"], line["weights"]) for line in told] == [("GPTQ int4 g32", "float32", 1)]
    assert torch.equal(parameters["lm_head.weight"], plain["lm_head.weight"])


HOSTILE = {
    "a group that does not exist": (
        "gptq-int4-act-order",
        "g_idx",
        lambda tensor: tensor.index_fill(0, torch.tensor(5), 4),
    ),
    "a negative group": ("gptq-int4-act-order", "g_idx", lambda tensor: tensor.index_fill(0, torch.tensor(5), -2)),
    "no group index": ("gptq-int4-act-order", "g_idx", lambda tensor: None),
    "another group index": ("gptq-int4", "g_idx", lambda tensor: tensor[:-1]),
    "scales of another size": ("gptq-int4", "scales", lambda tensor: tensor[:, :-1]),
    "scales of another type": ("gptq-int4", "scales", lambda tensor: tensor.int()),
    "words of another type": ("awq", "qweight", lambda tensor: tensor.short()),
    "words of another shape": ("awq", "qweight", lambda tensor: tensor.t()),
    "no zero points": ("awq", "qzeros", lambda tensor: None),
    "another shape": ("compressed-tensors-pack-int4", "weight_shape", lambda tensor: tensor + 1),
    "a scale of zero": ("compressed-tensors-nvfp4", "weight_global_scale", lambda tensor: tensor * 0),
    "a scale that is no number": (
        "compressed-tensors-nvfp4",
        "weight_global_scale",
        lambda tensor: tensor * float("nan"),
    ),
    "blocks of another shape": ("fp8-block", "weight_scale_inv", lambda tensor: tensor[:1]),
    "experts of another shape": ("mxfp4-experts", "experts.gate_up_proj_scales", lambda tensor: tensor[:2]),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_tensors_are_refused_in_one_line_before_anything_is_written(tmp_path: Path, what: str) -> None:
    name, key, change = HOSTILE[what]
    scheme, tensors, expected, parameter = case(name)
    changed = change(tensors.pop(f"m.{key}"))
    if changed is not None:
        tensors[f"m.{key}"] = changed.contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    target = torch.zeros(expected.shape)
    with pytest.raises(EngineError) as refusal:
        load_weights(tmp_path, {parameter: target}, scheme)
    assert key.rpartition(".")[2] in str(refusal.value) or parameter in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not target.any()


STATE = "weight.quant_state.bitsandbytes__nf4"


def state_with(tensor: Tensor, **changes: object) -> Tensor:
    return torch.tensor(list(json.dumps(json.loads(bytes(tensor.tolist())) | changes).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "key", "change"),
    [
        ("bitsandbytes-nf4", STATE, lambda tensor: tensor[:-1]),
        ("bitsandbytes-nf4", STATE, lambda tensor: tensor.unsqueeze(0)),
        ("bitsandbytes-nf4", STATE, lambda tensor: tensor.float()),
        ("bitsandbytes-nf4", STATE, lambda tensor: state_with(tensor, shape=[-1, -1])),
        ("compressed-tensors-pack-int4", "weight_shape", lambda tensor: tensor.unsqueeze(0)),
        ("compressed-tensors-pack-int4", "weight_shape", lambda tensor: tensor.float()),
    ],
)
def test_a_hostile_shape_is_refused_in_one_short_line(
    tmp_path: Path, name: str, key: str, change: Callable[[Tensor], Tensor]
) -> None:
    """Also for a model that transformers runs, which has no other shapes."""
    scheme, tensors, expected, parameter = case(name)
    save_file(tensors | {f"m.{key}": change(tensors[f"m.{key}"])}, tmp_path / "model.safetensors")
    with pytest.raises(EngineError) as refusal:
        load_weights(tmp_path, {parameter: torch.zeros(expected.shape)}, scheme)
    with pytest.raises(EngineError) as other:
        dequantized_tensors(Checkpoint(tmp_path), scheme, torch.float32)
    for each in (refusal, other):
        assert "\n" not in str(each.value)
        assert len(str(each.value)) < 100 + len(str(tmp_path)) + 2 * len(key)


def test_a_state_of_bitsandbytes_may_have_floats(tmp_path: Path) -> None:
    scheme, tensors, expected, parameter = case("bitsandbytes-nf4")
    tensors[f"m.{STATE}"] = state_with(tensors[f"m.{STATE}"], shape=[float(size) for size in expected.shape])
    save_file(tensors, tmp_path / "model.safetensors")
    load_weights(tmp_path, {parameter: (whole := torch.zeros(expected.shape))}, scheme)
    assert torch.equal(whole, expected.float())


UNEVEN = ("compressed-tensors-float8-block",)
"""Blocks that do not divide the inputs: always dequantized."""
EXPERTS = "mxfp4-experts"
PACKED = [
    name for name in CASES if name not in (*UNEVEN, EXPERTS) and bits_and_group(case(name)[0].rules[0][1]) is not None
]


@pytest.mark.parametrize("name", PACKED)
def test_packed_weights_are_those_that_are_dequantized(name: str) -> None:
    """The tensors for humming, of the whole weight and of a rank's rows and columns, also with the rows in another order."""
    scheme, tensors, expected, parameter = case(name)
    weights = scheme.format_of("m")
    assert weights is not None
    with_zeros = not getattr(weights, "symmetric", True)
    stored = {
        role: tensors[key]
        for role, each in weights.stored(parameter, tuple(expected.shape)).items()
        for key in each.names
        if key in tensors
    }
    bits, group = bits_and_group(weights) or (0, 0)
    columns = slice(group, 2 * group) if 0 < group <= 32 else slice(0, 64)
    for rows, inputs in ((slice(0, 32), slice(0, 64)), (slice(16, 24), columns)):
        words = slice(rows.start * bits // 32, rows.stop * bits // 32)
        held = {
            "weight": packed_codes(weights, stored, rows, inputs).clone(),
            "weight_scale": packed_scales(weights, stored, rows, inputs).clone(),
        }
        if with_zeros:
            held["zero_point"] = packed_zeros(weights, stored, words, inputs)
        wanted = expected[rows, inputs]
        for order in (torch.arange(len(wanted)), torch.arange(len(wanted)).flip(0).roll(3)):
            reorder_outputs(held, None, bits, order)
            dense = dense_weight(weights, held["weight"], held["weight_scale"], held.get("zero_point"))
            assert torch.equal(dense.to(expected.dtype), wanted[order])


def test_rows_in_fp8_in_another_order() -> None:
    """Two projections have a scale each."""
    parts = [Projection(name, ShardRange.whole(16), ShardRange.whole(32)) for name in "ab"]
    order, x = torch.arange(32).flip(0).roll(3), torch.randn(5, 32)
    results = []
    for given in (None, order):
        linear = Fp8Linear(
            parts, Fp8Format(scale_per_row=False, static_inputs=False), torch.device("cpu"), torch.float32, bias=True
        )
        torch.manual_seed(1)
        assert linear.bias is not None
        linear.weight.copy_(torch.randn(32, 32))
        linear.bias.copy_(torch.randn(32))
        for number, part in enumerate(parts, 1):
            linear.named_parameters()[f"{part.name}.weight_scale"].tensor.fill_(number)
        linear.process_weights_after_loading(given)
        results.append(linear(x))
    assert torch.equal(results[1], results[0][:, order])


@pytest.mark.parametrize("quantize", [None, "fp8"])
def test_a_rank_loads_its_rows_of_a_fused_projection(tmp_path: Path, quantize: str | None) -> None:
    """Dequantized, and in FP8."""
    draw = torch.Generator().manual_seed(5)
    weight = torch.randn(64, 32, generator=draw)
    values, scales = quantized_rows(weight)
    tensors = {"a.qkv_proj.weight": weight}
    if quantize is None:
        tensors = {"a.qkv_proj.weight": values, "a.qkv_proj.weight_scale": scales}
    scheme = online_fp8() if quantize else read_scheme(COMPRESSED_DYNAMIC)
    save_file(tensors, tmp_path / "model.safetensors")
    tp, device = TensorParallelRank(1, 2), torch.device("cpu")
    parts = [(name, ShardRange(rows // 2, rows // 2, rows)) for name, rows in (("q", 32), ("k", 16), ("v", 16))]
    expected = (values.float() * scales)[[*range(16, 32), *range(40, 48), *range(56, 64)]]
    for given in (scheme, None):
        projections = LayerProjections("a.", 32, given, tp, device, Precision.uniform(torch.float32))
        linear = projections.of_hidden(parts, "qkv_proj", bias=False)
        load_weights(tmp_path, linear.named_parameters(), scheme)
        linear.process_weights_after_loading()
        loaded = linear.weight.float()
        if isinstance(linear, Fp8Linear):
            loaded = loaded * linear.weight_scale.t()
        assert isinstance(linear, Fp8Linear) == (given is not None)
        assert torch.equal(loaded, expected)


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_packed_experts_are_those_that_are_dequantized(tmp_path: Path, rank: int | None) -> None:
    """gpt-oss has one tensor for all experts. A `rank` of two has half of the inputs."""
    scheme, tensors, expected, _ = case(EXPERTS)
    save_file(tensors, tmp_path / "model.safetensors")
    count, inputs, outputs = expected.shape
    part = slice(0, None) if rank is None else slice(rank * 32, rank * 32 + 32)
    whole, half = ShardRange.whole(outputs), ShardRange(part.start, 32 if rank is not None else inputs, inputs)
    for expert in range(count):
        empty = {
            "weight": torch.zeros(outputs, half.length // 8, dtype=torch.int32),
            "weight_scale": torch.zeros(outputs, half.length // 32, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        }
        projection = Projection(f"m.experts.{expert}.gate_up_proj", whole, half)
        parameters = packed_parameters([projection], GptOssMxfp4Format(), empty, (expert, count))
        load_weights(tmp_path, parameters, scheme)
        dense = dense_weight(Mxfp4Format(), empty["weight"], empty["weight_scale"], None)
        assert torch.equal(dense.to(expected.dtype), expected[expert, part].t())


def test_a_group_index_that_the_config_does_not_tell_is_refused_where_weights_are_packed() -> None:
    """Dequantization follows it."""
    _, tensors, _, _ = case("gptq-int4-act-order")
    weights = GptqFormat(4, 16, zero_offset=True, symmetric=False, desc_act=False)
    stored = {key.removeprefix("m."): tensor for key, tensor in tensors.items()}
    with pytest.raises(EngineError, match="not in order, contrary to the config"):
        packed_codes(weights, stored, slice(0, 32), slice(0, 64))


def test_zero_points_beyond_the_codes_are_refused_where_they_are_packed() -> None:
    weights = GptqFormat(4, 32, zero_offset=True, symmetric=False, desc_act=False)
    tensors = {"qzeros": torch.full((2, 4), -1, dtype=torch.int32)}
    with pytest.raises(EngineError, match="a zero point is 16, more than a code"):
        packed_zeros(weights, tensors, slice(0, 4), slice(0, 64))


@pytest.mark.parametrize(
    ("config", "own"),
    [
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 128},
            {"quant_method": "gptq", "bits": 4, "group_size": 128},
        ),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4, "group_size": 128},
            {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": False},
        ),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {
                    "weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"},
                    "input_tensors": {"dtype": "fp8_e4m3", "is_dynamic": False},
                },
            },
            {"quant_method": "modelopt", "quant_algo": "FP8"},
        ),
    ],
)
def test_a_method_with_the_tensors_of_another_is_read_as_that(
    config: dict[str, object], own: dict[str, object]
) -> None:
    assert read_scheme(config).rules == read_scheme(own).rules


def test_layers_that_auto_round_leaves_wide_are_not_quantized() -> None:
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "extra_config": {"lm_head": {"bits": 16}}}
    assert read_scheme(config).format_of("lm_head") is None
    with pytest.raises(UnsupportedSchemeError, match="another format for m"):
        read_scheme(config | {"extra_config": {"m": {"bits": 8}}})


def test_fbgemm_fp8_has_a_scale_by_row() -> None:
    (_, weights), *_ = read_scheme({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}).rules
    assert weights.label == "FP8 by row"
