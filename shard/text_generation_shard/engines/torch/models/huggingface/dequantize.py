"""Dequantizes the weights of a checkpoint for a model of transformers, which computes in 16 or 32 bits."""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.weights.checkpoint import Checkpoint
from text_generation_shard.engines.torch.weights.parameter import ParameterShard
from text_generation_shard.engines.torch.weights.quantization.format import WIDE, UnsupportedSchemeError, WeightFormat
from text_generation_shard.engines.torch.weights.quantization.formats.bitsandbytes import (
    KINDS,
    MAX_STATE,
    STATE,
    read_state,
)
from text_generation_shard.engines.torch.weights.quantization.loading import LoadingPlan, type_name
from text_generation_shard.engines.torch.weights.quantization.schemes import Scheme
from text_generation_shard.engines.torch.weights.transfer import copy_all

CODES = {".qweight": ".weight", ".weight_packed": ".weight", "_blocks": ""}
"""Ends of the names of tensors with codes, and of the weights that they stand for."""
PER_CODE = (1, 2, 4, 8, 16)
"""Numbers of values in one number of a tensor with codes."""
OTHERS = (
    ".input_scale",
    ".activation_scale",
    ".k_scale",
    ".v_scale",
    ".output_scale",
    ".bias_scale",
    ".weight_shape",
    ".weight_format",
)
"""Ends of the names of tensors beside the weights that are not needed, or no longer."""

Shape = tuple[int, ...]


def dequantized_tensors(checkpoint: Checkpoint, scheme: Scheme, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, with weights of `dtype` in the place of the quantized ones. Raises EngineError."""
    tensors = checkpoint.map(checkpoint.names)
    parts: dict[str, ParameterShard] = {}
    used: set[str] = set()
    for codes, weight in _quantized_weights(tensors):
        weights = scheme.format_of(weight.removesuffix(".weight"))
        if weights is None:
            raise EngineError(
                f"{checkpoint.path(codes)}: {codes} is {type_name(tensors[codes].dtype)}, and config.json's"
                f" quantization_config says nothing of it"
            )
        try:
            shape = _shape_of(weight, tensors[codes].shape, weights, tensors)
        except UnsupportedSchemeError as error:
            raise EngineError(f"{checkpoint.path(codes)}: {weight}: {error}") from None
        if shape is None:
            raise EngineError(
                f"{checkpoint.path(codes)}: {codes} of shape {list(tensors[codes].shape)} is not of {weights.label}"
            )
        parts[weight] = ParameterShard.whole(torch.empty(shape, dtype=dtype))
        used |= {name for each in weights.stored(weight, shape).values() for name in each.names}
    for _ in copy_all(LoadingPlan(checkpoint, parts, scheme).transfers()):
        pass
    plain = {name: each for name, each in tensors.items() if name not in used and not name.endswith(OTHERS)}
    return plain | {weight: part.tensor for weight, part in parts.items()}


def _quantized_weights(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the tensors with codes, and the weights that they stand for."""
    for name, tensor in tensors.items():
        end = next((end for end in CODES if name.endswith(end)), None)
        if end is not None:
            yield name, name.removesuffix(end) + CODES[end]
        elif name.endswith(".weight") and tensor.dtype not in WIDE:
            yield name, name


def _shape_of(weight: str, codes: torch.Size, weights: WeightFormat, tensors: Mapping[str, Tensor]) -> Shape | None:
    """Return the shape of a weight whose tensors have the shapes that `weights` stores it in; None if there is none."""
    for shape in _shapes(weight, codes, tensors):
        try:
            stored = weights.stored(weight, shape)
        except UnsupportedSchemeError:
            continue
        found = [(tensors[name], each) for each in stored.values() for name in each.names if name in tensors]
        if found and all(tuple(tensor.shape) in each.shapes for tensor, each in found):
            return shape
    return None


def _shapes(weight: str, codes: torch.Size, tensors: Mapping[str, Tensor]) -> Iterator[Shape]:
    """Yield shapes that a weight may have: codes are packed along one of its dimensions, which may be exchanged."""
    if (given := tensors.get(f"{weight}_shape")) is not None and given.dtype in (torch.int32, torch.int64):
        yield tuple(given.flatten().tolist())
    for kind in KINDS:
        if (state := tensors.get(f"{weight}{STATE}{kind}")) is not None and state.numel() <= MAX_STATE:
            shape = read_state(state).get("shape")
            if (
                isinstance(shape, list)
                and all(isinstance(each, int) for each in shape)
                and math.prod(shape) == 2 * codes.numel()
            ):
                yield tuple(shape)
    if len(codes) == 4:
        experts, outputs, groups, size = codes
        yield experts, 2 * groups * size, outputs
    if len(codes) == 2:
        first, second = codes
        for count in PER_CODE:
            yield first, second * count
            yield second, first * count
            yield second * count, first
