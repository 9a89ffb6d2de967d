"""Plans the loading of parameters from a checkpoint: copies, and weights that are quantized or dequantized on the way."""

from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from text_generation_common.log import log
from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.weights.checkpoint import Checkpoint
from text_generation_shard.engines.torch.weights.parameter import ParameterShard
from text_generation_shard.engines.torch.weights.quantization.format import (
    WIDE,
    StoredTensor,
    UnsupportedSchemeError,
    WeightFormat,
)
from text_generation_shard.engines.torch.weights.quantization.formats.float4 import GptOssMxfp4Format
from text_generation_shard.engines.torch.weights.quantization.formats.float8 import FP8, quantized_rows, row_scales
from text_generation_shard.engines.torch.weights.quantization.schemes import Scheme
from text_generation_shard.engines.torch.weights.transfer import Transfer

WEIGHT = ".weight"
OTHER_NAMES = {".weight_scale": ".weight_scale_inv", ".input_scale": ".activation_scale"}
"""Names of scales per tensor in transformers' `fp8`."""


class LoadingPlan:
    """The transfers that fill the parameters of a rank; nothing but headers and indices is read."""

    def __init__(self, checkpoint: Checkpoint, parts: Mapping[str, ParameterShard], scheme: Scheme | None) -> None:
        self._checkpoint = checkpoint
        self._parts = parts
        self._scheme = scheme
        self._online = scheme is not None and scheme.online
        self._dequantized: Counter[tuple[str, torch.dtype]] = Counter()

    def transfers(self) -> list[Transfer]:
        """Return the transfers in the order of the files. Raises EngineError for tensors that do not fit."""
        names = {key: self._stored_name(key) for key in self._parts}
        plain = self._checkpoint.map({stored for stored in names.values() if stored in self._checkpoint})
        formats: dict[str, WeightFormat] = {}
        transfers: dict[str, list[Transfer]] = {stored: [] for stored in plain}
        for key, stored in names.items():
            part, name = self._parts[key], self._name(key)
            tensor, other, packed = plain.get(stored), part.other, part.packed
            weights = self._format_of(name if packed is None else packed.name)
            if packed is not None and weights is not None:
                formats[key] = weights
            elif tensor is not None and tensor.dtype in (*WIDE, part.tensor.dtype):
                # Experts are not quantized online: no layer computes with the result.
                online = weights if self._online and other is None else None
                transfers[stored].append(self._copy(key, stored, tensor, online))
            elif weights is not None and len(part.shape) > 1 and part.tensor.dtype in WIDE:
                formats[key] = weights
            elif tensor is None:
                names_tried = name if other is None else f"{name} or {other.name}"
                raise EngineError(f"{self._checkpoint.folder}: the checkpoint has no tensor {names_tried}")
            else:
                raise self._error(stored, f"{name} is {type_name(tensor.dtype)}, a quantized checkpoint")
        return [transfer for some in transfers.values() for transfer in some] + self._dequantizations(formats)

    def _format_of(self, name: str) -> WeightFormat | None:
        for suffix in (WEIGHT, *OTHER_NAMES):
            name = name.removesuffix(suffix)
        return None if self._scheme is None else self._scheme.format_of(name)

    def _name(self, key: str) -> str:
        return self._parts[key].name or key

    def _stored_name(self, key: str) -> str:
        """Return the name of the tensor that a parameter is read from, unless its weight is in a quantized format."""
        name = self._name(key)
        if name not in self._checkpoint:
            if (source := self._parts[key].other) is not None and source.name in self._checkpoint:
                return source.name
            for suffix, other in OTHER_NAMES.items():
                if name.endswith(suffix):
                    return name.removesuffix(suffix) + (WEIGHT if self._online else other)
        return name

    def _copy(self, key: str, stored: str, tensor: Tensor, online: WeightFormat | None) -> Transfer:
        part, name = self._parts[key], self._name(key)
        if name != stored and online is not None:
            # The scales of rows that are quantized while they are loaded; each rank has its own columns.
            weight = self._checked(key.rpartition(".")[0] + WEIGHT, stored, tensor)
            return Transfer(lambda rows: row_scales(weight[rows]), part.tensor, weight.nbytes)
        source = self._checked(key, stored, tensor)
        if online is not None and name.endswith(WEIGHT):
            return Transfer(_quantize(source, part.tensor.dtype), part.tensor, source.nbytes)
        if part.tensor.dtype == FP8 and tensor.dtype != FP8:
            raise self._error(stored, f"{name} is {type_name(tensor.dtype)}, config.json says {type_name(FP8)}")
        return Transfer.of(source, part.tensor)

    def _checked(self, key: str, stored: str, tensor: Tensor) -> Tensor:
        """Return this rank's part of the tensor `stored` of the right shape."""
        part = self._parts[key]
        tensor = tensor.reshape(1) if tensor.ndim == 0 else tensor
        other = part.other if part.other is not None and part.other.name == stored else None
        shape = part.shape if other is None else other.shape
        if tuple(tensor.shape) != shape:
            raise self._error(stored, f"{stored} has shape {list(tensor.shape)}, config.json says {list(shape)}")
        return part.select(tensor if other is None else other.select(tensor, part.shape[0]))

    def _dequantizations(self, formats: Mapping[str, WeightFormat]) -> list[Transfer]:
        """Return the transfers of weights in a quantized format."""
        found = {name: self._found(name, weights) for name, weights in formats.items()}
        mapped = self._checkpoint.map({source for each in found.values() for source, _ in each.values()})
        places = {source: place for place, source in enumerate(mapped)}
        transfers = []
        for name in sorted(formats, key=lambda name: min(places[source] for source, _ in found[name].values())):
            tensors = {role: mapped[source] for role, (source, _) in found[name].items()}
            transfers.append(self._dequantization(name, formats[name], found[name], tensors))
        for (label, dtype), count in self._dequantized.items():
            log.info(
                "weights are dequantized while they are loaded", format=label, dtype=type_name(dtype), weights=count
            )
        return transfers

    def _found(self, name: str, weights: WeightFormat) -> dict[str, tuple[str, StoredTensor]]:
        """Return the names of the tensors that stand for the weight of a parameter, and what is expected of each."""
        try:
            stored = weights.stored(*self._quantized(name, weights))
        except UnsupportedSchemeError as error:
            raise EngineError(f"{self._checkpoint.folder}: {error}") from None
        found = {}
        for role, expected in stored.items():
            existing = next((each for each in expected.names if each in self._checkpoint), None)
            if existing is not None:
                found[role] = existing, expected
            elif not expected.optional:
                raise EngineError(
                    f"{self._checkpoint.folder}: the checkpoint has no tensor {expected.names[0]}"
                    f" for {name} in {weights.label}"
                )
        return found

    def _dequantization(
        self,
        name: str,
        weights: WeightFormat,
        found: Mapping[str, tuple[str, StoredTensor]],
        tensors: Mapping[str, Tensor],
    ) -> Transfer:
        part = self._parts[name]
        for role, (source, expected) in found.items():
            tensor = tensors[role]
            if tuple(tensor.shape) not in expected.shapes:
                shapes = " or ".join(str(list(shape)) for shape in expected.shapes[:8])
                raise self._error(source, f"{source} has shape {list(tensor.shape)}, {weights.label} has {shapes} here")
            if tensor.dtype not in expected.dtypes:
                raise self._error(source, f"{source} is {type_name(tensor.dtype)}, not of {weights.label}")
        try:
            weights.check(tensors, self._quantized(name, weights)[1])
        except UnsupportedSchemeError as error:
            raise self._error(next(iter(found.values()))[0], f"{name}: {error}") from None
        if (packed := part.packed) is not None:
            return Transfer(
                lambda rows: packed.read(tensors, slice(part.starts[0] + rows.start, part.starts[0] + rows.stop)),
                part.tensor,
                part.tensor.nbytes,
            )
        self._dequantized[weights.label, part.tensor.dtype] += 1
        inner = [slice(start, start + size) for start, size in zip(part.starts, part.tensor.shape, strict=True)][1:]

        nbytes, expert = sum(tensor.nbytes for tensor in tensors.values()), None
        if (other := part.other) is not None and isinstance(weights, GptOssMxfp4Format):
            nbytes, expert = nbytes // other.shape[0], other.expert

        def read(rows: slice) -> Tensor:
            outer = slice(part.starts[0] + rows.start, part.starts[0] + rows.stop)
            if expert is None:
                return weights.dequantize(tensors, (outer, *inner))
            return weights.dequantize(tensors, (slice(expert, expert + 1), *inner, outer))[0].t()

        return Transfer(read, part.tensor, nbytes)

    def _quantized(self, key: str, weights: WeightFormat) -> tuple[str, tuple[int, ...]]:
        """Return the name and the shape of the weight that a parameter is read from."""
        part = self._parts[key]
        if part.packed is not None:
            return part.packed.name, part.packed.shape
        if part.other is not None and isinstance(weights, GptOssMxfp4Format):
            return part.other.name, part.other.shape
        return self._name(key), part.shape

    def _error(self, stored: str, problem: str) -> EngineError:
        return EngineError(f"{self._checkpoint.path(stored)}: {problem}")


def _quantize(weight: Tensor, dtype: torch.dtype) -> Callable[[slice], Tensor]:
    """Return the function that quantizes rows of a weight to FP8; for a wider dtype, it also dequantizes them."""

    def read(rows: slice) -> Tensor:
        quantized, scales = quantized_rows(weight[rows])
        return quantized if dtype == FP8 else quantized.float() * scales

    return read


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
