"""Experts whose weights stay packed, against the loop over dequantized ones. Needs a GPU and humming-kernels."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from reference_ops import relative_error
from torch import Tensor

from text_generation_shard.engines.torch.kernels.experts import experts
from text_generation_shard.engines.torch.kernels.operands import GatedActivation
from text_generation_shard.engines.torch.layers.expert_linear import ExpertLinear, experts_by_loop
from text_generation_shard.engines.torch.layers.linear import Projection
from text_generation_shard.engines.torch.layers.quantized.humming import HummingExperts
from text_generation_shard.engines.torch.parallel.tensor_parallel import ShardRange
from text_generation_shard.engines.torch.weights.quantization.format import WeightFormat
from text_generation_shard.engines.torch.weights.quantization.formats.float4 import GptOssMxfp4Format, Mxfp4Format
from text_generation_shard.engines.torch.weights.quantization.formats.float8 import Fp8BlockFormat, Fp8Format
from text_generation_shard.engines.torch.weights.quantization.formats.packed_integers import PackedIntegerFormat

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("humming") is None, reason="needs a GPU and humming-kernels"
)

COUNT, EACH, HIDDEN, INNER = 5, 2, 256, 192
FORMATS: dict[str, WeightFormat] = {
    "int4": PackedIntegerFormat(bits=4, group_size=64, symmetric=True),
    "int4 with zero points": PackedIntegerFormat(bits=4, group_size=64, symmetric=False),
    "FP8 blocks": Fp8BlockFormat((64, 64)),
    "FP8 rows": Fp8Format(scale_per_row=True, static_inputs=False),
    "MXFP4": Mxfp4Format(),
    "gpt-oss": GptOssMxfp4Format(),
}


def random_tensors(weights: WeightFormat, name: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Return random tensors that stand for a weight of about unit variance over its inputs."""
    tensors = {}
    for role, stored in weights.stored(name, shape).items():
        size, dtype = stored.shapes[-1], stored.dtypes[0]
        if stored.optional:
            continue
        if dtype == torch.int32:
            tensors[role] = torch.randint(-(1 << 31), 1 << 31, size).int()
        elif dtype == torch.uint8:
            low, high = (113, 123) if role in ("scale", "scales") else (0, 256)
            tensors[role] = torch.randint(low, high, size, dtype=torch.uint8)
        elif role == "scale":
            tensors[role] = torch.rand(size) * 0.02 + 0.005
        else:
            tensors[role] = torch.randn(size).to(dtype)
    return tensors


def product(weights: WeightFormat, name: str, outputs: int, inputs: int) -> tuple[ExpertLinear, ExpertLinear]:
    """Return a random product with packed weights, and the same with dequantized ones."""
    stacked = isinstance(weights, GptOssMxfp4Format)
    sizes = ShardRange.whole(outputs), ShardRange.whole(inputs)
    projections = [[Projection(f"experts.{expert}.{name}", *sizes)] for expert in range(COUNT)]
    device = torch.device("cuda")
    layer = HummingExperts(projections, weights, device, torch.bfloat16, kept_bytes=0)
    if stacked:
        stored = [random_tensors(weights, f"experts.{name}", (COUNT, inputs, outputs))] * COUNT
        whole = tuple(slice(0, size) for size in (COUNT, inputs, outputs))
        dense = weights.dequantize(stored[0], whole).transpose(1, 2)
    else:
        stored = [random_tensors(weights, f"{each[0].name}.weight", (outputs, inputs)) for each in projections]
        dense = torch.stack([weights.dequantize(each, (slice(0, outputs), slice(0, inputs))) for each in stored])
    for expert, tensors in enumerate(stored):
        for parameter, part in layer.named_parameters().items():
            if parameter.startswith(f"experts.{expert}."):
                assert part.packed is not None
                part.tensor.copy_(part.packed.read(tensors, slice(0, part.tensor.shape[0])))
    layer.process_weights_after_loading()
    is_mxfp4 = isinstance(weights, Mxfp4Format | GptOssMxfp4Format)
    assert (layer.panels is not None) == (is_mxfp4 and torch.cuda.get_device_capability() == (9, 0))
    bias = torch.randn(COUNT, outputs, device=device, dtype=torch.bfloat16) if stacked else None
    placeholder = torch.empty(COUNT, outputs, 0, device=device, dtype=torch.bfloat16)
    return ExpertLinear(placeholder, bias, layer), ExpertLinear(dense.to(device, torch.bfloat16), bias)


@pytest.mark.parametrize("name", FORMATS)
def test_packed_experts_compute_what_dequantized_ones_do(name: str) -> None:
    torch.manual_seed(1)
    weights = FORMATS[name]
    is_gpt_oss = name == "gpt-oss"
    activation = GatedActivation("clamped_swiglu", interleaved=True) if is_gpt_oss else GatedActivation("silu")
    (gate_up, dense_gate_up), (down, dense_down) = (
        product(weights, "gate_up_proj", 2 * INNER, HIDDEN),
        product(weights, "down_proj", HIDDEN, INNER),
    )
    for tokens in (1, 3, 40, 700):
        x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        # The last expert has no tokens.
        ids = torch.rand(tokens, COUNT - 1, device="cuda").topk(EACH).indices
        shares = torch.rand(tokens, EACH, device="cuda")
        expected = experts_by_loop(x, ids, shares, dense_gate_up, dense_down, activation)
        found = experts(x, ids, shares, gate_up, down, activation)
        assert relative_error(found, expected) < 2e-2, tokens
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            replayed = experts(x, ids, shares, gate_up, down, activation)
        graph.replay()
        assert torch.equal(replayed, found), tokens
