"""y = x·Wᵀ + b with weights and activations in float8_e4m3fn and one scale per row of each.

The scales are factored out of the sum: y[t, n] = x_scale[t] · w_scale[n] · Σ x8[t, k] · w8[n, k], summed in float32. For a few rows
a kernel that reads the weight as fast as the device can multiplies activations that are not quantized: see kernels/matvec.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from text_generation_shard.engines.torch.device.copies import compute_capability
from text_generation_shard.engines.torch.kernels.packed_weight import Fp8Weight
from text_generation_shard.engines.torch.layers.linear import Projection, fused_parameters, fused_rows
from text_generation_shard.engines.torch.weights.parameter import ParameterShard
from text_generation_shard.engines.torch.weights.quantization.formats.float8 import FP8, FP8_MAX, MIN_SCALE, Fp8Format

MIN_CAPABILITY = (8, 9)
"""Minimum compute capability (Ada); Hopper is (9, 0)."""
SIZE_MULTIPLE = 16
"""`_scaled_mm` needs both dimensions of a weight to be divisible by this."""
FAST_ACCUMULATION = True
"""On Hopper, the tensor cores accumulate with about 14 bits: far more precise than the rounding to FP8."""


def can_multiply(projections: Sequence[Projection], device: torch.device) -> bool:
    """Return True if the device can multiply these in FP8. If not, weights are widened when they are loaded."""
    outputs = sum(projection.outputs.length for projection in projections)
    if outputs % SIZE_MULTIPLE or projections[0].inputs.length % SIZE_MULTIPLE:
        return False
    return device.type == "cpu" or compute_capability(device) >= MIN_CAPABILITY


class Fp8Linear:
    """Fused projections in FP8: `weight` [outputs, inputs], `weight_scale` float32 [1, outputs], optional bias."""

    def __init__(
        self,
        projections: Sequence[Projection],
        weights: Fp8Format,
        device: torch.device,
        dtype: torch.dtype,
        *,
        bias: bool,
    ) -> None:
        self.projections = tuple(projections)
        rows = sum(projection.outputs.length for projection in projections)
        self.weight = torch.empty(rows, projections[0].inputs.length, device=device, dtype=FP8)
        self.bias = torch.empty(rows, device=device, dtype=dtype) if bias else None
        self.weight_scale = torch.empty(1, rows, device=device)
        self.input_scale: Tensor | None = None
        """float32 [1] with static scaling: one for all projections, because they share their input."""
        self._dtype = dtype
        self._part_scales = None if weights.scale_per_row else torch.empty(len(projections), device=device)
        self._input_scales = torch.empty(len(projections), device=device) if weights.static_inputs else None

    def named_parameters(self) -> dict[str, ParameterShard]:
        parameters = fused_parameters(self.projections, "weight", self.weight)
        parameters |= fused_parameters(self.projections, "bias", self.bias)
        rows = fused_rows(self.projections, self.weight_scale.view(-1, 1))
        for index, projection in enumerate(self.projections):
            own, outputs = slice(index, index + 1), projection.outputs
            key, name = projection.names("weight_scale")
            scale = ParameterShard(rows[index], (outputs.total, 1), (outputs.start, 0), name)
            if self._part_scales is not None:
                scale = ParameterShard(self._part_scales[own], (1,), (0,), name)
            parameters[key] = scale
            if self._input_scales is not None:
                key, name = projection.names("input_scale")
                parameters[key] = ParameterShard(self._input_scales[own], (1,), (0,), name)
        return parameters

    def process_weights_after_loading(self, order: Tensor | None = None) -> None:
        """Expand weight scales to one per row; use the largest input scale for all projections; `order`: see `ParallelLinear`."""
        if self._part_scales is not None:
            rows = fused_rows(self.projections, self.weight_scale.view(-1))
            for row_scales, scale in zip(rows, self._part_scales, strict=True):
                row_scales.copy_(scale.expand_as(row_scales))
        if self._input_scales is not None:
            self.input_scale = self._input_scales.max().view(1)
        if order is not None:
            for tensor in (self.weight.view(torch.uint8), self.weight_scale.view(-1), self.bias):
                if tensor is not None:
                    tensor.copy_(tensor[order.to(tensor.device)])

    @property
    def matvec_weight(self) -> Fp8Weight:
        """The weight for products of a few rows, whose activations are not quantized."""
        return Fp8Weight(self.weight, self.weight_scale.view(-1))

    def pack(self) -> None:
        """Nothing to pack: on a CPU the products are emulated."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return y [rows, outputs] for x [rows, inputs], written to `out` if given."""
        if x.device.type == "cpu":
            y = self._emulated(x)
            return y if out is None else out.copy_(y)
        # Imports Triton, which a CPU does not need.
        from text_generation_shard.engines.torch.kernels.fp8_product import fp8_product, is_faster
        from text_generation_shard.engines.torch.kernels.quantize import quantize_rows

        x8 = torch.empty_like(x, dtype=FP8)
        x_scale = torch.empty(x.shape[0], 1, device=x.device)
        quantize_rows(x, x8, x_scale, self.input_scale)
        if out is None:
            out = x.new_empty(len(x), len(self.weight), dtype=self._dtype)
        if is_faster(x8, self.weight):
            fp8_product(x8, x_scale, self.weight, self.weight_scale, self.bias, out)
        elif self._dtype == torch.bfloat16:
            self._library_product(x8, x_scale, self.bias, out)
        else:  # row scales have bfloat16 output on all devices
            out.copy_(self._library_product(x8, x_scale, None, None))
            out = out if self.bias is None else out.add_(self.bias)
        return out

    def _library_product(self, x8: Tensor, x_scale: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        """Multiply by cuBLAS, with bfloat16 output."""
        # Its public form, torch.nn.functional.scaled_mm, is of later versions than the oldest that is supported.
        y: Tensor = torch._scaled_mm(
            x8,
            self.weight.t(),
            x_scale,
            self.weight_scale,
            bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=FAST_ACCUMULATION,
            out=out,
        )
        return y

    def _emulated(self, x: Tensor) -> Tensor:
        """Compute the same in float32 on a CPU, so that tests need no GPU."""
        values = x.float()
        if self.input_scale is None:
            scale = (values.abs().amax(1, keepdim=True) / FP8_MAX).clamp_min(MIN_SCALE)
        else:
            scale = self.input_scale
        x8 = (values / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        y = (x8.float() * scale) @ (self.weight.float() * self.weight_scale.t()).t()
        return (y if self.bias is None else y + self.bias.float()).to(self._dtype)
