"""y = x·Wᵀ + b by humming-kernels: packed weights of 4 and 8 bits, activations in the model's dtype.

humming compiles kernels for each shape and format when it is first called, into the folder HUMMING_CACHE_DIR (default
~/.humming/cache): on an H200, 47 s for an 8B model, 0.6 s for each product from the cache. They can be captured in CUDA graphs.

Measured on an H200, the products of a layer of an 8B model in int4 have 2.01, 1.85, 1.14, 0.89 and 0.96 times the speed of cuBLAS
in bfloat16 at 1, 32, 128, 256 and 2,048 rows. The small ones, of queries, keys and values and of the output, are slower from about
100 rows on (0.87, 0.79 and 0.88): those are computed by cuBLAS with a dequantized copy. Integers and FP8 have a second copy, in the
order of our own kernel for a few rows, which is fused with the operations next to it: see kernels/packed_matvec.py.
"""

import functools
import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from text_generation_shard.engines.torch.device.copies import compute_capability
from text_generation_shard.engines.torch.kernels.packed_weight import ExpertPanels, PackedWeight
from text_generation_shard.engines.torch.layers.linear import Projection, fused_parameters
from text_generation_shard.engines.torch.layers.quantized.packed_format import (
    bits_and_group,
    dense_weight,
    packed_bits_and_group,
    packed_parameters,
    packed_tensors,
    reorder_outputs,
    weight_config,
)
from text_generation_shard.engines.torch.weights.parameter import ParameterShard
from text_generation_shard.engines.torch.weights.quantization.format import WeightFormat
from text_generation_shard.engines.torch.weights.quantization.formats.float4 import GptOssMxfp4Format, Mxfp4Format
from text_generation_shard.engines.torch.weights.quantization.formats.integers import GroupedIntegers, unpacked

if TYPE_CHECKING:
    from humming.config import LayerConfig

MAX_ROWS, MAX_COPIED = 96, 1 << 25
"""Rows from which on a dequantized copy is faster, for weights of at most MAX_COPIED values; larger ones have no copy."""
FREE_FOR_CACHE = 0.5
"""Share of the device's memory that copies for our own kernels leave free."""
FREE_FOR_STEPS = 1 / 16
"""Copies for one token of a mixture may leave less: this share beside the KV cache that is wanted."""
OUTPUT_MULTIPLE, INPUT_MULTIPLE = 128, 32
"""Multiples of the sizes of a weight that its layout needs."""
MIN_CAPABILITY, HOPPER = (8, 0), (9, 0)
FEW_ROWS, WIDE_OUTPUTS = (16, 32), 1 << 14
"""Rows for which humming chooses a slower tiling on an H200, of weights of 4 bits: 83 against 65 µs for the products of a layer of
an 8B model at 32 rows. Weights with many outputs are fastest with wide tiles."""

OUTPUT_PADDING, INPUT_PADDING = 256, 64
"""Outputs and inputs of the weights of experts are padded to multiples of these, for which humming has fast tilings."""
GEMM_TYPE = "grouped_contiguous"
GROUPED = json.dumps({"gemm_type": GEMM_TYPE})
MAX_EXPERT_ROWS = 1 << 16
"""The most rows of experts for which humming chooses a tiling of its own."""
_compilers = ThreadPoolExecutor(thread_name_prefix="humming")
"""One thread for each product that is compiled; humming has threads of its own for its tilings."""


@functools.cache
def is_installed() -> bool:
    return find_spec("humming") is not None


def can_multiply(
    projections: Sequence[Projection], weights: WeightFormat | None, device: torch.device, *, padded: bool = False
) -> bool:
    """Return True if humming is installed and multiplies these projections on the device; `padded`: with padded outputs."""
    found = bits_and_group(weights)
    if found is None or device.type == "cpu" or not is_installed() or not torch.cuda.is_available():
        return False
    if compute_capability(device) < MIN_CAPABILITY:
        return False
    inputs, group = projections[0].inputs, found[1] or 1
    outputs = [projection.outputs for projection in projections]
    return (
        (padded or sum(part.length for part in outputs) % OUTPUT_MULTIPLE == 0)
        and all(part.length % 8 == 0 and part.start % 8 == 0 for part in outputs)
        and inputs.length % INPUT_MULTIPLE == 0
        and inputs.start % max(group, INPUT_MULTIPLE) == 0
        and inputs.length % group == 0
    )


class HummingLinear:
    """Fused projections in a packed format: weights int32 [outputs, inputs·bits/32] until they are processed."""

    def __init__(
        self,
        projections: Sequence[Projection],
        weights: WeightFormat,
        device: torch.device,
        dtype: torch.dtype,
        *,
        bias: bool,
    ) -> None:
        from humming.layer import HummingLayer

        self.projections = tuple(projections)
        self._weights, (self._bits, _) = weights, packed_bits_and_group(weights)
        with torch.device(device):
            self._layer = HummingLayer(
                shape_n=sum(projection.outputs.length for projection in projections),
                shape_k=projections[0].inputs.length,
                weight_config=weight_config(weights, dtype),
                torch_dtype=dtype,
                has_bias=bias,
            )
        self.weight: Tensor = self._layer.weight.data
        self.bias: Tensor | None = self._layer.bias.data if bias else None
        self._dense: Tensor | None = None
        self.matvec_weight: PackedWeight | None = None

    def named_parameters(self) -> dict[str, ParameterShard]:
        parts = packed_parameters(self.projections, self._weights, packed_tensors(self._layer))
        return parts | fused_parameters(self.projections, "bias", self.bias)

    def process_weights_after_loading(self, order: Tensor | None = None) -> None:
        """Copy a small weight, dequantized, and others for our own kernel; reorder the packed weight for humming's.

        `order`: see `ParallelLinear`.
        """
        layer = self._layer
        if order is not None:
            reorder_outputs(packed_tensors(layer), self.bias, self._bits, order.to(self.weight.device))
        scales = layer.weight_scale.data
        zeros = layer.zero_point.data if hasattr(layer, "zero_point") else None
        if layer.shape_n * layer.shape_k <= MAX_COPIED:
            self._dense = dense_weight(self._weights, self.weight, scales, zeros).to(layer.torch_dtype)
        if has_copy(self.projections, self.weight.device):
            self.matvec_weight = matvec_copy(self._weights, self.weight, scales, zeros)
        layer.transform()
        self.weight = layer.weight.data
        self._tilings = tilings(layer.humming_config, self._bits)

    def pack(self) -> None:
        """Nothing to reorder: a CPU has no such layers."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return y [rows, outputs] for x [rows, inputs] in the model's dtype, written to `out` if given."""
        if self._dense is None or x.shape[0] < MAX_ROWS:
            return self.packed_product(x, out)
        if self.bias is None:
            return torch.mm(x, self._dense.t(), out=out)
        return torch.addmm(self.bias, x, self._dense.t(), out=out)

    def packed_product(
        self, x: Tensor, out: Tensor | None, options: str | None = None, tiling: str | None = None
    ) -> Tensor:
        """Compute the product with the packed weight at any number of rows, with humming's options or another tiling."""
        from humming.layer import HummingLayerMethod

        if options is None and tiling is None:
            tiling = self._tilings.of(x.shape[0])
        y: Tensor = HummingLayerMethod.forward_layer(
            self._layer, x, outputs=out, compute_config=options, tuning_config=tiling
        )
        return y


class Tilings:
    """The tilings of a product by its number of rows, which are compiled in other threads until one is needed.

    humming compiles a list of tilings in threads, and fails sometimes if one is listed more than once: each is compiled once here,
    and a call names the one it needs.
    """

    def __init__(self, config: "LayerConfig", options: str | None, found: Iterable[tuple[int, dict[str, Any]]]) -> None:
        """`found`: the most rows of each tiling, in ascending order."""
        from humming.kernel import HummingKernel

        self._ends, self._tilings = [], []
        for last, tiling in found:
            self._ends.append(last)
            self._tilings.append(json.dumps(tiling))
        each = ", ".join(f"[0, 1, {tiling}]" for tiling in dict.fromkeys(self._tilings))
        device = torch.cuda.current_device()
        self._compiled = _compilers.submit(HummingKernel.prepare_kernels, config.to_str(), options, f"[{each}]", device)

    def of(self, rows: int) -> str:
        self._compiled.result()
        return self._tilings[bisect_left(self._ends, rows)]


@functools.cache
def tilings(config: "LayerConfig", bits: int) -> Tilings:
    """Compile humming's tilings of a product, on Hopper GPUs with better ones where they were measured.

    All kernels are launched with programmatic dependent launch there: see kernels/pdl.py.
    """
    from humming.tune import get_heuristics_config

    is_hopper = torch.cuda.get_device_capability() == HOPPER
    found = []
    for _, last, own in get_heuristics_config(config):
        tiling = own | {"use_pdl": True} if is_hopper else own
        is_few = is_hopper and bits == 4 and FEW_ROWS[0] < last <= FEW_ROWS[1]
        if is_few and config.shape_n % 256 == 0 and config.shape_k % 64 == 0:
            is_wide = config.shape_n >= WIDE_OUTPUTS
            tiling = {
                "mma_type": "wgmma",
                "block_shape": (last, 256 if is_wide else 128, 64),
                "warp_shape": (last, 32, 64),
                "num_stages": 6 if is_wide else 4,
                "num_ctas_per_sm": 2,
                "use_warp_spec": True,
                "use_tma": True,
                "use_pdl": True,
            }
        found.append((last, tiling))
    return Tilings(config, None, found)


def has_copy(projections: Sequence[Projection], device: torch.device, kept_bytes: int | None = None) -> bool:
    """Return True if there is room for a copy of a weight for our own kernels; the KV cache needs the rest of the memory.

    Divided weights have none: ranks must compute the same products, and their free memory differs. `kept_bytes`: of the cache for
    which the copy leaves memory, if that is less than FREE_FOR_CACHE.
    """
    if not all(each.is_whole for each in projections):
        return False
    free, total = torch.cuda.mem_get_info(device)
    return free >= left_by_copies(total, kept_bytes)


def left_by_copies(total: int, kept_bytes: int | None = None) -> float:
    """Return the memory that copies leave, of `total`; `kept_bytes`: see `has_copy`."""
    half = FREE_FOR_CACHE * total
    return half if kept_bytes is None else min(half, FREE_FOR_STEPS * total + kept_bytes)


def copies_may_lack_room(device: torch.device) -> bool:
    """Return True if a copy of all weights would leave less memory than FREE_FOR_CACHE."""
    if device.type == "cpu":
        return False
    free, total = torch.cuda.mem_get_info(device)
    return free - torch.cuda.memory_allocated(device) < left_by_copies(total)


def matvec_copy(weights: WeightFormat, words: Tensor, scales: Tensor, zeros: Tensor | None) -> PackedWeight | None:
    """Return a copy of packed weights [outputs, …] for our own kernel of a few rows; None if it does not take such groups."""
    integers, (bits, _) = isinstance(weights, GroupedIntegers), packed_bits_and_group(weights)
    points = None if zeros is None else unpacked(zeros, bits, 0)
    if scales.dtype == torch.float8_e8m0fnu:  # powers of two
        scales = scales.to(torch.bfloat16)
    return PackedWeight.of(words, scales, points, bits, floats=not integers)


class HummingExperts:
    """A product with one packed weight for each expert, in the formats of `HummingLinear` and in MXFP4 as gpt-oss stores it.

    One kernel multiplies the rows of each expert, which are next to each other, with the expert's weight.
    """

    def __init__(
        self,
        experts: Sequence[Sequence[Projection]],
        weights: WeightFormat,
        device: torch.device,
        dtype: torch.dtype,
        kept_bytes: int | None,
    ) -> None:
        """`experts` has the projections of each expert, which are fused; all have the same sizes. `kept_bytes`: see `has_copy`."""
        from humming.layer import HummingLayer

        self._experts, self._weights, self._kept_bytes = experts, weights, kept_bytes
        self.matvec_weight: PackedWeight | None = None
        self.panels: ExpertPanels | None = None
        with torch.device(device):
            self._layer = HummingLayer(
                shape_n=sum(projection.outputs.length for projection in experts[0]),
                shape_k=experts[0][0].inputs.length,
                weight_config=weight_config(weights, dtype),
                num_experts=len(experts),
                torch_dtype=dtype,
                pad_n_to_multiple=OUTPUT_PADDING,
                pad_k_to_multiple=INPUT_PADDING,
            )

    def named_parameters(self) -> dict[str, ParameterShard]:
        parameters: dict[str, ParameterShard] = {}
        tensors = packed_tensors(self._layer)
        stacked = isinstance(self._weights, GptOssMxfp4Format)
        for expert, projections in enumerate(self._experts):
            own = {name: tensor[expert] for name, tensor in tensors.items()}
            place = (expert, len(self._experts)) if stacked else None
            parameters |= packed_parameters(projections, self._weights, own, place)
        return parameters

    def process_weights_after_loading(self) -> None:
        """Copy the weights for our own kernels; reorder them for humming's."""
        tensors, device = packed_tensors(self._layer), self._layer.weight.device
        if has_copy(self._experts[0], device, self._kept_bytes):
            flat = {name: tensor.flatten(0, 1) for name, tensor in tensors.items()}
            stored = flat["weight"], flat["weight_scale"], flat.get("zero_point")
            self.matvec_weight = matvec_copy(self._weights, *stored)
        is_mxfp4 = isinstance(self._weights, Mxfp4Format | GptOssMxfp4Format)
        takes_panels = is_mxfp4 and self._layer.torch_dtype == torch.bfloat16 and compute_capability(device) == HOPPER
        if takes_panels and has_copy(self._experts[0], device):
            self.panels = ExpertPanels.of(tensors["weight"], tensors["weight_scale"])
        self._layer.transform()
        self._tilings = expert_tilings(self._layer.humming_config)

    def __call__(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Return y [rows, outputs] for x [rows, inputs]; `offsets`, int32 [experts + 1], has the first row of each expert."""
        from humming.layer import HummingLayerMethod

        tiling = self._tilings.of(x.shape[0])
        y: Tensor = HummingLayerMethod.forward_layer(
            self._layer, x, expert_layout=offsets, compute_config=GROUPED, tuning_config=tiling
        )
        return y


@functools.cache
def expert_tilings(config: "LayerConfig") -> Tilings:
    """Compile humming's tilings for powers of two of rows: to find all that it knows takes minutes."""
    from humming.tune import get_heuristics_config

    ends = [1 << exponent for exponent in range(MAX_EXPERT_ROWS.bit_length())]
    found = [
        (1 << 30 if end == MAX_EXPERT_ROWS else end, get_heuristics_config(config, shape_m=end, gemm_type=GEMM_TYPE))
        for end in ends
    ]
    return Tilings(config, GROUPED, found)
