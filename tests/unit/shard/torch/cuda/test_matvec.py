"""Products of a weight with few rows, compared with their formulas in float64."""

from __future__ import annotations

from typing import NamedTuple, get_args

import pytest
import torch
from full_grid import full
from reference_ops import activate, rms_norm, rounded_once
from torch import Tensor

from text_generation_shard.engines.torch.kernels import matvec as kernels
from text_generation_shard.engines.torch.kernels.matvec import MAX_ROWS, MatvecConfig, config_for, matvec
from text_generation_shard.engines.torch.kernels.operands import GatedActivation
from text_generation_shard.engines.torch.kernels.packed_weight import Fp8Weight
from text_generation_shard.engines.torch.weights.quantization.formats.float8 import FP8

EPS = 1e-5
# (outputs, inputs): less than a warp; an odd number of inputs; a power of two; several warps.
SHAPES = [full(5, 24), (3, 577), (8, 512), full(7, 1536)]


@pytest.fixture(params=[264, 1], autouse=True, ids=["one row per program", "several rows per program"])
def programs_wanted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights are tiled into single rows, unless fewer programs are wanted."""
    monkeypatch.setattr(kernels, "PROGRAMS_WANTED", request.param)


class Make(NamedTuple):
    """Creates tensors, by default in the dtype of weights."""

    device: torch.device
    dtype: torch.dtype

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype or self.dtype)

    def poisoned(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.full(shape, torch.nan, device=self.device, dtype=dtype or self.dtype)


@pytest.fixture
def make(device: torch.device, dtype: torch.dtype) -> Make:
    return Make(device, dtype)


@pytest.mark.parametrize("rows", [1, full(2), full(3), MAX_ROWS])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_the_product_matches_float64(make: Make, rows: int, outputs: int, inputs: int) -> None:
    x, weight = make.normal(rows, inputs), make.normal(outputs, inputs)
    out = make.poisoned(rows, outputs, dtype=torch.float32)
    matvec(x, weight, out)
    assert rounded_once(out, x.double() @ weight.double().T)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_the_rows_of_a_weight_in_fp8_have_scales(make: Make, outputs: int, inputs: int) -> None:
    """The scale of a row does not apply to its bias."""
    weight = Fp8Weight(make.normal(2 * outputs, inputs, dtype=FP8), torch.rand(2 * outputs, device=make.device))
    dense = weight.values.double() * weight.scales.double().unsqueeze(1)
    x, norm_weight = make.normal(1, inputs, dtype=torch.float32), make.normal(inputs)
    bias, out, inner = make.normal(2 * outputs), make.poisoned(1, 2 * outputs), make.poisoned(1, outputs)
    matvec(x, weight, out, bias, scale=0.5)
    assert rounded_once(out, 0.5 * (x.double() @ dense.T + bias.double()))
    product = rms_norm(x.double(), norm_weight.double(), EPS) @ dense.T + bias.double()
    matvec(x, weight, inner, bias, norm=(norm_weight, EPS), activation=GatedActivation("silu"))
    assert rounded_once(inner, activate(product, "silu"))


@pytest.mark.parametrize(("rows", "biased"), [(1, False), (MAX_ROWS, True)])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_the_norm_is_fused(make: Make, rows: int, outputs: int, inputs: int, biased: bool) -> None:
    residual = 7 * make.normal(rows, inputs, dtype=torch.float32)
    norm_weight, weight = make.normal(inputs), make.normal(outputs, inputs)
    bias = make.normal(outputs) if biased else None
    out = make.poisoned(rows, outputs)
    normed = make.poisoned(rows, inputs)
    matvec(residual, weight, out, bias, norm=(norm_weight, EPS), normed=normed)
    assert rounded_once(normed, rms_norm(residual.double(), norm_weight.double(), EPS))
    expected = rms_norm(residual.double(), norm_weight.double(), EPS) @ weight.double().T
    assert rounded_once(out, expected if bias is None else expected + bias.double())


@pytest.mark.parametrize("kind", ["silu", full("gelu"), full("gelu_pytorch_tanh")])
@pytest.mark.parametrize(("rows", "inner", "inputs", "biased"), [(1, 6, 576, False), (MAX_ROWS, 5, 24, True)])
def test_the_gated_activation_is_fused(make: Make, kind: str, rows: int, inner: int, inputs: int, biased: bool) -> None:
    residual = make.normal(rows, inputs, dtype=torch.float32)
    norm_weight = make.normal(inputs)
    weight = make.normal(2 * inner, inputs) / inputs**0.5
    bias = make.normal(2 * inner) if biased else None
    out = make.poisoned(rows, inner)
    matvec(residual, weight, out, bias, norm=(norm_weight, EPS), activation=GatedActivation(kind))
    gate_up = rms_norm(residual.double(), norm_weight.double(), EPS) @ weight.double().T
    assert rounded_once(out, activate(gate_up if bias is None else gate_up + bias.double(), kind))


@pytest.mark.parametrize("rows", [1, MAX_ROWS])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_the_product_is_added_to_the_residual_stream(make: Make, rows: int, outputs: int, inputs: int) -> None:
    x, weight, bias = (make.normal(*shape) for shape in ((rows, inputs), (outputs, inputs), (outputs,)))
    residual = 50 * make.normal(rows, outputs, dtype=torch.float32)
    expected = residual.double() + x.double() @ weight.double().T
    matvec(x, weight, residual, add=True)
    assert rounded_once(residual, expected)
    product = x.double() @ weight.double().T + bias.double()
    expected = residual.double() + product * 0.3
    matvec(x, weight, residual, bias, add=True, scale=0.3)
    assert rounded_once(residual, expected)


def test_a_bias_is_added_before_rounding_and_rows_may_be_strided(make: Make) -> None:
    wide_x, wide_out = make.normal(2, 128), make.poisoned(2, 64)
    weight, bias = make.normal(7, 96), 100 * make.normal(7)
    matvec(wide_x[:, :96], weight, wide_out[:, :7], bias)
    assert rounded_once(wide_out[:, :7], wide_x[:, :96].double() @ weight.double().T + bias.double())
    assert wide_out[:, 7:].isnan().all()


def test_a_row_does_not_depend_on_other_rows(make: Make) -> None:
    residual = make.normal(3, 576, dtype=torch.float32)
    residual[2] = 0.0  # finite because of eps
    norm_weight, weight = make.normal(576), make.normal(10, 576)
    outs = make.poisoned(2, 3, 10)
    for out in outs:
        matvec(residual, weight, out, norm=(norm_weight, EPS))
        residual[1] = torch.nan
    assert outs[0, 0].equal(outs[1, 0])
    assert outs[1, 1].isnan().all()
    assert outs[:, 2].eq(0).all()


def test_products_with_programmatic_dependent_launch(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the kernels overlap; in the interpreter only the code path is tested."""
    layers, size = (24, 2048) if make.device.type == "cuda" else (3, 16)
    weights, norm_weight = make.normal(layers, size, size) / size**0.5, make.normal(size)
    results: list[Tensor] = []
    for order in get_args(kernels.Order):
        monkeypatch.setitem(kernels.TUNED, (1, size, size), MatvecConfig(block_n=4, num_warps=4, order=order))
        residual, x = torch.ones(1, size, device=make.device), make.poisoned(1, size)
        for weight in weights:
            matvec(residual, weight, x, norm=(norm_weight, EPS))
            matvec(x, weight, residual, add=True)
        results.append(residual)
    assert results[0].isfinite().all()
    assert all(result.equal(results[0]) for result in results)


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(960, 576), (6144, 4096), (4096, 14336), (128256, 8192), (8192, 28672)]
)
def test_tilings_fit_the_registers_and_use_all_multiprocessors(
    outputs: int, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "TUNED", {})  # only derived tilings are bounded
    for rows in range(1, MAX_ROWS + 1):
        for parts in (1, 2):
            config = config_for(rows, outputs, inputs, gated=parts == 2)
            elements = parts * config.block_n * inputs / (32 * config.num_warps)
            room = 128 if rows == 1 else 64  # elements; two per register, of which a thread has 255
            assert config.block_n == 1 or elements <= room
            assert config.block_n == 1 or outputs // parts // config.block_n >= kernels.PROGRAMS_WANTED
