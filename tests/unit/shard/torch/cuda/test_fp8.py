"""FP8: quantization of activations, products, and FP8 checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from full_grid import full
from reference_ops import relative_error as error
from tiny_checkpoint import (
    COMPRESSED_DYNAMIC,
    MODELOPT_STATIC,
    dequantized,
    load_for_cuda,
    quantized,
    random_tensors,
    write_checkpoint,
)
from torch import Tensor

from text_generation_shard.engines.torch.kernels.fp8_product import fp8_product
from text_generation_shard.engines.torch.kernels.quantize import quantize_rows
from text_generation_shard.engines.torch.layers.linear import ParallelLinear
from text_generation_shard.engines.torch.layers.quantized.fp8 import Fp8Linear
from text_generation_shard.engines.torch.models.native.config import read_model_config
from text_generation_shard.engines.torch.models.native.parameters import empty_weights
from text_generation_shard.engines.torch.parallel.tensor_parallel import TensorParallelRank
from text_generation_shard.engines.torch.weights.load import fill_dummy

FP8 = torch.float8_e4m3fn
FUSED = {"qkv": ("q_proj", "k_proj", "v_proj"), "output": ("o_proj",), "gate_up": ("gate_proj", "up_proj")}
INPUT_SCALE = 0.004
"""Times 448: the few values beyond 1.8 of inputs drawn from N(0, 1) are clamped."""
SCHEMES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "scale per row, dynamic": (COMPRESSED_DYNAMIC, {"per_row": True}),
    "scale per tensor, static": (MODELOPT_STATIC, {"per_row": False, "input_scale": INPUT_SCALE}),
}


def rounded(values: Tensor) -> Tensor:
    """Round float64 values to float8_e4m3fn, ties to even, clamped to ±448."""
    exponents = values.abs().log2().floor().clamp(min=-6.0)
    steps = torch.exp2(exponents - 3)
    return ((values / steps).round() * steps).clamp(-448.0, 448.0)


def scale_of(x: Tensor, fixed: Tensor | None) -> Tensor:
    """Return the scales, float64 [rows, 1]."""
    if fixed is not None:
        return fixed.double().expand(x.shape[0], 1)
    return (x.double().abs().amax(1, keepdim=True) / 448).clamp_min(1 / (448 * 512))


def without_defects(x: Tensor, fixed: Tensor | None) -> Tensor:
    """Return x without the values that Triton's interpreter (3.6) rounds wrongly: subnormals, and up to a power of two."""
    if x.device.type == "cuda":
        return x
    values = (x.double() / scale_of(x, fixed)).abs()
    fraction = values / torch.exp2(values.log2().floor())
    return x.masked_fill((values < 2**-6) | (fraction > 1.9) & (values < 448), 0.0)


@pytest.mark.parametrize("dtype", [full(torch.bfloat16), torch.float16, full(torch.float32)], ids=str)
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize(("rows", "columns"), [full(1, 576), full(7, 1536), (3, 131)])
def test_rows_are_rounded_to_nearest(
    device: torch.device, dtype: torch.dtype, static: bool, rows: int, columns: int
) -> None:
    fixed = torch.tensor([0.005], device=device) if static else None
    wide = torch.randn(rows, columns + 16, device=device) * torch.tensor(3.0, device=device).pow(
        torch.arange(rows, device=device).unsqueeze(1) - 2
    )
    x = without_defects(wide.to(dtype)[:, :columns], fixed)
    out = torch.full((rows, columns), float("nan"), device=device).to(FP8)
    scales = torch.full((rows, 1), float("nan"), device=device)
    quantize_rows(x, out, scales, fixed)
    assert error(scales, scale_of(x, fixed)) < 1e-6
    values = x.double() / scales.double()
    # Ties: the interpreter rounds up, a GPU to even; both results are equally near.
    nearest = (rounded(values) - values).abs()
    assert ((out.double() - values).abs() <= nearest + 1e-6 * values.abs()).all()


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(5, 80, 256), full(33, 192, 512), full(128, 64, 256)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_product_of_some_rows(
    device: torch.device, rows: int, outputs: int, inputs: int, has_bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(rows, inputs).to(FP8), torch.randn(outputs, inputs).to(FP8)
    x_scales, weight_scales = torch.rand(rows, 1) + 0.5, torch.rand(1, outputs) + 0.5
    bias = torch.randn(outputs).to(dtype) if has_bias else None
    expected = (x.double() * x_scales) @ (weight.double() * weight_scales.t()).t()
    expected = expected if bias is None else expected + bias.double()
    wide = torch.full((rows, outputs + 8), torch.nan, dtype=dtype, device=device)
    moved = (each.to(device) for each in (x, x_scales, weight, weight_scales))
    fp8_product(*moved, None if bias is None else bias.to(device), wide[:, :outputs])
    assert error(wide[:, :outputs].cpu(), expected) < 3e-3
    assert wide[:, outputs:].isnan().all()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # from numpy, in the interpreter
def test_zero_rows_stay_zero_and_non_finite_rows_become_nan(device: torch.device) -> None:
    x = torch.randn(4, 64, device=device)
    x[0] = 0.0
    x[1, 5] = float("nan")
    x[2, 7] = float("inf")
    out, scales = torch.empty(4, 64, device=device).to(FP8), torch.empty(4, 1, device=device)
    quantize_rows(x, out, scales)
    values = out.float() * scales
    assert values[0].eq(0).all()
    assert scales[0] > 0  # 0 / 0 would be NaN
    assert values.isnan().any(1).tolist() == [False, True, True, False]
    assert scales.isfinite().flatten().tolist() == [True, False, False, True]


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def reference_product(tensors: dict[str, Tensor], modules: tuple[str, ...], x: Tensor) -> Tensor:
    """Compute the product in float64 from a checkpoint's tensors; fused projections share the largest input scale."""
    named = [name for name in tensors if name.startswith("model.layers.1.") and name.split(".")[-2] in modules]
    by_module = sorted(
        (name for name in named if name.endswith(".weight")), key=lambda name: modules.index(name.split(".")[-2])
    )
    weight = torch.cat([dequantized(tensors)[name] for name in by_module]).double()
    inputs = [tensors[name] for name in named if name.endswith("input_scale")]
    fixed = torch.stack(inputs).max().view(1) if inputs else None
    scale = scale_of(x, fixed)
    return (rounded(x.double() / scale) * scale) @ weight.t()


@pytest.mark.parametrize("scheme", list(SCHEMES))
@pytest.mark.parametrize("size", [1, 2])
def test_products_match_the_dequantized_checkpoint(
    tmp_path: Path, device: torch.device, scheme: str, size: int
) -> None:
    config, how = SCHEMES[scheme]
    tensors = quantized(random_tensors(), **how)
    write_checkpoint(tmp_path, tensors, {"quantization_config": config})
    x = torch.randn(5, 64).to(dtype_on(device)).float()
    for rank in range(size):
        weights = load_for_cuda(tmp_path, device, dtype_on(device), TensorParallelRank(rank, size))
        inputs = x.to(device, weights.embedding.dtype)
        out = torch.full((5, 192 // size), float("nan"), device=device, dtype=inputs.dtype)
        weights.layers[1].mlp.gate_up(inputs, out)
        whole = reference_product(tensors, FUSED["gate_up"], x)
        expected = torch.cat([half.chunk(size, 1)[rank] for half in whole.chunk(2, 1)], 1)
        # The GPU rounds the product to bfloat16 and sums with about 14 bits.
        assert error(out.cpu(), expected) < (1e-2 if device.type == "cuda" else 1e-3)
        assert isinstance(weights.layers[1].mlp.down, Fp8Linear)
        assert weights.head.weight.dtype == weights.embedding.dtype
    if size == 1:
        qkv = weights.layers[1].attention.qkv(inputs).cpu()
        assert error(qkv, reference_product(tensors, FUSED["qkv"], x)) < (1e-2 if device.type == "cuda" else 1e-3)


@pytest.mark.parametrize("size", [1, 2])
def test_rows_are_quantized_while_they_are_loaded(tmp_path: Path, device: torch.device, size: int) -> None:
    """--quantize fp8: as a checkpoint whose rows were quantized before; a rank scales the rows of its own columns."""
    tensors = random_tensors()
    plain = write_checkpoint(tmp_path / "plain", tensors)
    before = quantized(tensors, per_row=True)
    packed = write_checkpoint(tmp_path / "packed", before, {"quantization_config": COMPRESSED_DYNAMIC})
    for rank in range(size):
        tp = TensorParallelRank(rank, size)
        online = load_for_cuda(plain, device, dtype_on(device), tp, "fp8").layers[1]
        offline = load_for_cuda(packed, device, dtype_on(device), tp).layers[1]
        assert isinstance(online.attention.qkv, Fp8Linear)
        assert isinstance(offline.attention.qkv, Fp8Linear)
        assert torch.equal(
            online.attention.qkv.weight.view(torch.uint8), offline.attention.qkv.weight.view(torch.uint8)
        )
        assert torch.equal(online.attention.qkv.weight_scale, offline.attention.qkv.weight_scale)
        assert isinstance(online.attention.output, Fp8Linear)
        columns = tensors["model.layers.1.self_attn.o_proj.weight"].chunk(size, 1)[rank]
        assert (
            error(online.attention.output.weight_scale.cpu().t(), columns.double().abs().amax(1, keepdim=True) / 448)
            < 1e-6
        )
        assert (
            error(
                (online.attention.output.weight.float() * online.attention.output.weight_scale.t()).cpu(),
                columns.double(),
            )
            < 4e-2
        )


def test_biases_are_added_and_weights_of_unsupported_sizes_are_widened(tmp_path: Path, device: torch.device) -> None:
    changes = {"attention_bias": True, "intermediate_size": 88, "quantization_config": COMPRESSED_DYNAMIC}
    tensors = quantized(random_tensors(changes), per_row=True)
    layer = load_for_cuda(write_checkpoint(tmp_path, tensors, changes), device, dtype_on(device)).layers[1]
    out = layer.attention.qkv(torch.zeros(2, 64, device=device, dtype=layer.mlp_norm.weight.dtype))
    expected = torch.cat([tensors[f"model.layers.1.self_attn.{name}.bias"] for name in FUSED["qkv"]])
    assert error(out.cpu(), expected.double().expand(2, -1)) < 1e-2
    assert isinstance(layer.mlp.down, ParallelLinear)
    expected = dequantized(tensors)["model.layers.1.mlp.down_proj.weight"].to(layer.mlp.down.weight.dtype)
    assert torch.equal(layer.mlp.down.weight.cpu(), expected)


def test_products_of_projections_that_are_not_all_quantized_are_dequantized(
    tmp_path: Path, device: torch.device
) -> None:
    tensors = random_tensors()
    key = "model.layers.1.self_attn.k_proj"
    changes = {"quantization_config": COMPRESSED_DYNAMIC | {"ignore": ["lm_head", "re:.*down_proj", key]}}
    kept = {name: tensors[name] for name in tensors if "down_proj" in name or name.startswith(key)}
    mixed = quantized(tensors, per_row=True) | kept
    layer = load_for_cuda(write_checkpoint(tmp_path, mixed, changes), device, dtype_on(device)).layers[1]
    types = [
        type(linear) for linear in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
    ]
    assert types == [ParallelLinear, Fp8Linear, Fp8Linear, ParallelLinear]
    expected = torch.cat([dequantized(mixed)[f"model.layers.1.self_attn.{part}.weight"] for part in FUSED["qkv"]])
    assert torch.equal(layer.attention.qkv.weight.cpu(), expected.to(layer.attention.qkv.weight.dtype))


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_dummy_weights_have_the_expected_deviation(tmp_path: Path, device: torch.device, scheme: str) -> None:
    config: dict[str, Any] = {"quantization_config": SCHEMES[scheme][0]}
    folder = write_checkpoint(tmp_path, {}, config)
    weights = empty_weights(read_model_config(folder), TensorParallelRank(), device, torch.bfloat16, on_cpu=False)
    fill_dummy(weights.named_parameters())
    weights.process_weights_after_loading()
    down = weights.layers[0].mlp.down
    assert isinstance(down, Fp8Linear)
    assert (down.weight.float() * down.weight_scale.t()).std().item() == pytest.approx(0.02, rel=0.1)
    x = torch.randn(3, 96, device=device, dtype=torch.bfloat16)
    assert error(down(x), x.double() @ (down.weight.double() * down.weight_scale.double().t()).t()) < 0.05
