"""The formats of weights that humming-kernels multiplies with, and the tensors in which its layers hold them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.layers.linear import Projection
from text_generation_shard.engines.torch.weights.parameter import PackedSource, ParameterShard
from text_generation_shard.engines.torch.weights.quantization.format import WeightFormat
from text_generation_shard.engines.torch.weights.quantization.formats.float4 import (
    E2M1,
    MXFP4_GROUP,
    GptOssMxfp4Format,
    Mxfp4Format,
)
from text_generation_shard.engines.torch.weights.quantization.formats.float8 import FP8, Fp8BlockFormat, Fp8Format
from text_generation_shard.engines.torch.weights.quantization.formats.integers import (
    WORD_BITS,
    GroupedIntegers,
    packed,
    unpacked,
)
from text_generation_shard.engines.torch.weights.quantization.formats.packed_integers import PackedIntegerFormat


def bits_and_group(weights: WeightFormat | None) -> tuple[int, int] | None:
    """Return the bits of a weight and the inputs of a group (0: all), if humming multiplies with this format."""
    if isinstance(weights, GroupedIntegers) and not weights.desc_act:
        return weights.bits, max(weights.group_size, 0)
    if isinstance(weights, Fp8BlockFormat):
        return 8, weights.block[1]
    if isinstance(weights, Fp8Format):
        return 8, 0
    if isinstance(weights, Mxfp4Format | GptOssMxfp4Format):
        return 4, MXFP4_GROUP
    return None


def packed_tensors(layer: torch.nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a layer of humming that is not yet transformed."""
    return {name: getattr(layer, name).data for name in _READERS if hasattr(layer, name)}


def packed_parameters(
    projections: Sequence[Projection],
    weights: WeightFormat,
    tensors: Mapping[str, Tensor],
    stacked: tuple[int, int] | None = None,
) -> dict[str, ParameterShard]:
    """Return the parts of fused projections, which `packed_tensors` hold, by name.

    `stacked`: the expert and the number of experts, where a checkpoint has one weight [experts, inputs, outputs] for all of them.
    """
    (bits, group), inputs = packed_bits_and_group(weights), projections[0].inputs
    columns = slice(inputs.start, inputs.start + inputs.length)
    parameters = {}
    for kind, fused in tensors.items():
        per_column = WORD_BITS // bits if kind == "weight" else group or inputs.total
        per_row = sum(projection.outputs.length for projection in projections) // fused.shape[0]
        lengths = [projection.outputs.length // per_row for projection in projections]
        for projection, rows in zip(projections, torch.split(fused, lengths), strict=True):
            name, shape = _source(projection, stacked)
            key, own = projection.names(kind)
            parameters[key] = ParameterShard(
                rows,
                (projection.outputs.total // per_row, inputs.total // per_column),
                (projection.outputs.start // per_row, inputs.start // per_column),
                own,
                PackedSource(name, shape, partial(_read, _READERS[kind], weights, columns, stacked), _spread(weights)),
            )
    return parameters


def _spread(weights: WeightFormat) -> float | None:
    if isinstance(weights, Fp8BlockFormat | Fp8Format):
        return None
    bits, _ = packed_bits_and_group(weights)
    codes = torch.arange(1 << bits).float() if isinstance(weights, GroupedIntegers) else torch.tensor(E2M1)
    return float(codes.std())


def _source(projection: Projection, stacked: tuple[int, int] | None) -> tuple[str, tuple[int, ...]]:
    """Return the name and the shape of the weight in a checkpoint."""
    if stacked is None:
        return f"{projection.name}.weight", projection.shape
    expert, count = stacked
    module, _, name = projection.name.rpartition(f".{expert}.")
    return f"{module}.{name}", (count, projection.inputs.total, projection.outputs.total)


def _read(
    reader: "Reader",
    weights: WeightFormat,
    columns: slice,
    stacked: tuple[int, int] | None,
    tensors: Mapping[str, Tensor],
    rows: slice,
) -> Tensor:
    if stacked is not None:
        tensors = {"packed": tensors["blocks"][stacked[0]].flatten(1), "scale": tensors["scales"][stacked[0]]}
    return reader(weights, tensors, rows, columns)


def packed_codes(weights: WeightFormat, tensors: Mapping[str, Tensor], rows: slice, columns: slice) -> Tensor:
    """Return codes packed along the inputs: int32 [rows, columns·bits/32]."""
    bits, _ = packed_bits_and_group(weights)
    if isinstance(weights, GroupedIntegers):
        if weights.symmetric and not (weights.zeros(tensors, rows) == 1 << (bits - 1)).all():
            raise EngineError(f"{weights.label}: zero points are not in the middle, and the config says symmetric")
        if weights.order(tensors) is not None:
            raise EngineError(f"{weights.label}: the groups of inputs are not in order, contrary to the config")
        if isinstance(weights, PackedIntegerFormat):
            per_word = WORD_BITS // bits
            return tensors["packed"][rows, columns.start // per_word : columns.stop // per_word]
        return packed(weights.codes(tensors, rows, columns), bits, 1)
    per_byte = 8 // bits
    stored = tensors["packed" if "packed" in tensors else "weight"][rows]
    stored = stored[:, columns.start // per_byte : columns.stop // per_byte]
    return stored.flatten().view(torch.int32).view(len(stored), -1)


def packed_scales(weights: WeightFormat, tensors: Mapping[str, Tensor], rows: slice, columns: slice) -> Tensor:
    """Return scales [rows, groups]."""
    groups = _groups(weights, columns)
    if isinstance(weights, GroupedIntegers):
        return weights.scales(tensors, rows)[:, groups]
    if isinstance(weights, Fp8BlockFormat):
        return tensors["scale"].float()[torch.arange(rows.start, rows.stop) // weights.block[0]][:, groups]
    if isinstance(weights, Fp8Format):
        return tensors["scale"].float().reshape(-1, 1).expand(len(tensors["weight"]), 1)[rows]
    return tensors["scale"][rows, groups].view(torch.float8_e8m0fnu)


def packed_zeros(weights: WeightFormat, tensors: Mapping[str, Tensor], rows: slice, columns: slice) -> Tensor:
    """Return zero points packed along the outputs: int32 [rows, groups], with 32 / bits outputs in a row."""
    assert isinstance(weights, GroupedIntegers)
    bits, _ = packed_bits_and_group(weights)
    outputs = slice(rows.start * (WORD_BITS // bits), rows.stop * (WORD_BITS // bits))
    zeros = weights.zeros(tensors, outputs)[:, _groups(weights, columns)]
    if int(zeros.max()) >> bits:
        raise EngineError(f"{weights.label}: a zero point is {int(zeros.max())}, more than a code")
    return packed(zeros, bits, 0)


def reorder_outputs(tensors: Mapping[str, Tensor], bias: Tensor | None, bits: int, order: Tensor) -> None:
    """Reorder the outputs of the tensors of `packed_tensors` and a bias in place: output i is the former output order[i]."""
    for kind, tensor in tensors.items():
        if kind == "zero_point":
            tensor.copy_(packed(unpacked(tensor, bits, 0)[order], bits, 0))
        else:
            values = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
            values.copy_(values[order])
    if bias is not None:
        bias.copy_(bias[order])


def dense_weight(weights: WeightFormat, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Return the weight [outputs, inputs] in float32 from the packed tensors."""
    bits, _ = packed_bits_and_group(weights)
    inputs = codes.shape[1] * (WORD_BITS // bits)
    factors = scales.float().repeat_interleave(inputs // scales.shape[1], 1)
    if isinstance(weights, Fp8BlockFormat | Fp8Format):
        return codes.view(FP8).float() * factors
    values = unpacked(codes, bits, 1)
    if isinstance(weights, Mxfp4Format | GptOssMxfp4Format):
        return torch.tensor(E2M1, device=codes.device)[values.int()] * factors
    if zeros is None:
        return (values.float() - (1 << (bits - 1))) * factors
    return (values.float() - unpacked(zeros, bits, 0).repeat_interleave(inputs // scales.shape[1], 1)) * factors


def packed_bits_and_group(weights: WeightFormat) -> tuple[int, int]:
    """Return `bits_and_group` of a format that humming multiplies with."""
    found = bits_and_group(weights)
    assert found is not None
    return found


def _groups(weights: WeightFormat, columns: slice) -> slice:
    """Return the groups of a range of inputs that begins and ends with a group."""
    _, group = packed_bits_and_group(weights)
    return slice(columns.start // group, columns.stop // group) if group else slice(0, 1)


def weight_config(weights: WeightFormat, dtype: torch.dtype) -> dict[str, Any]:
    """Return humming's description of a format; `dtype` is the model's."""
    bits, group = packed_bits_and_group(weights)
    own = str(dtype).removeprefix("torch.")
    if isinstance(weights, GroupedIntegers):
        symmetric = weights.symmetric
        return {"dtype": f"uint{bits}", "group_size": group, "scale_dtype": own, "has_zero_point": not symmetric}
    if isinstance(weights, Fp8BlockFormat | Fp8Format):
        return {"dtype": "float8e4m3", "group_size": group, "scale_dtype": own}
    return {"dtype": "float4e2m1", "group_size": group, "scale_dtype": "float8e8m0"}


Reader = Callable[[WeightFormat, Mapping[str, Tensor], slice, slice], Tensor]
"""Returns rows and columns of a tensor from those of a checkpoint; columns are inputs of the weight."""
_READERS: "dict[str, Reader]" = {"weight": packed_codes, "weight_scale": packed_scales, "zero_point": packed_zeros}
"""By the names of humming's tensors."""
