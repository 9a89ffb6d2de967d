"""bitsandbytes: NF4 and FP4 (Dettmers et al. 2023, arXiv 2305.14314), and 8-bit integers (LLM.int8(), arXiv 2208.07339).

Of a 4-bit weight all values are a row: two in a byte, the first in the upper bits, each the place of a number of `quant_map`, with
a factor `absmax` for a block of values. With double quantization the factors are places of numbers of `nested_quant_map` as well.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from text_generation_shard.engines.torch.weights.quantization.format import (
    StoredTensor,
    UnsupportedSchemeError,
    WeightFormat,
    sibling,
    two_dimensions,
)

KINDS = ("nf4", "fp4")
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
NESTED_BLOCK_SIZE = 256
INT8_MAX = 127.0
STATE = ".quant_state.bitsandbytes__"
"""Between the name of a weight and the kind of its codes: the name of a tensor with JSON."""
MAX_STATE = 1024
"""Bytes of JSON."""
FLOAT, BYTES = (torch.float32,), (torch.uint8,)


@dataclass(frozen=True, slots=True)
class FourBitFormat(WeightFormat):
    """4-bit codes: `weight` uint8 [outputs·inputs/2, 1], `weight.absmax`, `weight.quant_map` and `weight.quant_state`."""

    kind: str

    @property
    def label(self) -> str:
        return f"bitsandbytes {self.kind}"

    def stored(self, name: str, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        outputs, inputs = two_dimensions(name, shape)
        count = outputs * inputs
        if inputs % 2:
            raise UnsupportedSchemeError(f"{name} has {inputs} inputs: bitsandbytes packs two in a byte")
        blocks = [-(-count // size) for size in BLOCK_SIZES]
        nested = tuple((-(-each // NESTED_BLOCK_SIZE),) for each in blocks)
        lengths = tuple((length,) for length in range(1, MAX_STATE))
        return {
            "codes": StoredTensor((name,), ((count // 2, 1), (1, count // 2)), BYTES),
            "absmax": StoredTensor((f"{name}.absmax",), tuple((each,) for each in blocks), (*FLOAT, *BYTES)),
            "map": StoredTensor((f"{name}.quant_map",), ((16,),), FLOAT),
            "nested_absmax": StoredTensor((f"{name}.nested_absmax",), nested, FLOAT, optional=True),
            "nested_map": StoredTensor((f"{name}.nested_quant_map",), ((256,),), FLOAT, optional=True),
            "state": StoredTensor((f"{name}{STATE}{self.kind}",), lengths, BYTES),
        }

    def check(self, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> None:
        state, absmax = read_state(tensors["state"]), tensors["absmax"]
        size = state.get("blocksize")
        if size not in BLOCK_SIZES or absmax.shape[0] != -(-shape[0] * shape[1] // size):
            raise UnsupportedSchemeError(f"blocksize is {str(size)[:50]}, and there are {absmax.shape[0]} blocks")
        if state.get("shape") != list(shape):
            raise UnsupportedSchemeError(f"shape is {str(state.get('shape'))[:50]}, config.json says {list(shape)}")
        if absmax.dtype != torch.uint8:
            return
        nested = tensors.get("nested_absmax"), tensors.get("nested_map")
        if any(each is None for each in nested) or not isinstance(state.get("nested_offset"), float | int):
            raise UnsupportedSchemeError("absmax is quantized, and its nested tensors are missing")
        if state.get("nested_blocksize") != NESTED_BLOCK_SIZE:
            raise UnsupportedSchemeError(f"nested_blocksize is not {NESTED_BLOCK_SIZE}")

    def dequantize(self, tensors: Mapping[str, Tensor], ranges: Sequence[slice]) -> Tensor:
        rows, columns = ranges
        state = read_state(tensors["state"])
        inputs = int(state["shape"][1])
        first, last = rows.start * inputs, rows.stop * inputs
        pairs = tensors["codes"].flatten()[first // 2 : last // 2]
        codes = torch.stack((pairs >> 4, pairs & 0xF), -1).flatten().long()
        blocks = torch.arange(first, last) // int(state["blocksize"])
        values = tensors["map"][codes] * _factors(tensors, state)[blocks]
        dtype: torch.dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(
            str(state.get("dtype")), torch.float32
        )
        return values.to(dtype).view(-1, inputs)[:, columns]


@dataclass(frozen=True, slots=True)
class EightBitFormat(WeightFormat):
    """8-bit integers: `weight` int8 [outputs, inputs], `SCB` float32 [outputs], the largest value of each output."""

    label = "bitsandbytes int8"

    def stored(self, name: str, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        outputs, _ = two_dimensions(name, shape)
        return {
            "weight": StoredTensor((name,), (shape,), (torch.int8,)),
            "scale": StoredTensor((sibling(name, "SCB"),), ((outputs,),), FLOAT),
            "layout": StoredTensor((sibling(name, "weight_format"),), ((), (1,)), BYTES, optional=True),
        }

    def check(self, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> None:
        if "layout" in tensors and int(tensors["layout"]) != 0:
            raise UnsupportedSchemeError("weight_format is not that of rows")

    def dequantize(self, tensors: Mapping[str, Tensor], ranges: Sequence[slice]) -> Tensor:
        rows, columns = ranges
        weight, largest = tensors["weight"][rows, columns], tensors["scale"][rows]
        return weight * largest.unsqueeze(1) * (1 / INT8_MAX)


def _factors(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Tensor:
    absmax = tensors["absmax"]
    if absmax.dtype != torch.uint8:
        return absmax
    blocks = torch.arange(len(absmax)) // NESTED_BLOCK_SIZE
    nested = tensors["nested_map"][absmax.long()] * tensors["nested_absmax"][blocks]
    return nested + float(state["nested_offset"])


def read_state(tensor: Tensor) -> dict[str, Any]:
    try:
        state = json.loads(bytes(tensor.flatten().tolist()))
    except (TypeError, ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise UnsupportedSchemeError("quant_state is not a JSON object")
    return state


def read_bitsandbytes(given: Mapping[str, Any]) -> WeightFormat:
    if given.get("load_in_8bit") or given.get("_load_in_8bit"):
        return EightBitFormat()
    kind = given.get("bnb_4bit_quant_type") or "fp4"
    if kind not in KINDS:
        raise UnsupportedSchemeError(f"bitsandbytes: {str(kind)[:50]} is not supported, only {', '.join(KINDS)}")
    if (storage := given.get("bnb_4bit_quant_storage") or "uint8") != "uint8":
        raise UnsupportedSchemeError(f"bitsandbytes: codes in {str(storage)[:50]} are not supported, only in uint8")
    return FourBitFormat(kind)
