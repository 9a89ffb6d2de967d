"""GPTQ as AutoGPTQ and GPTQModel write it (Frantar et al. 2022, arXiv 2210.17323).

Codes are packed along the inputs: `qweight` int32 [inputs·bits/32, outputs]. Zero points are packed along the outputs: `qzeros`
int32 [groups, outputs·bits/32]. `scales` is [groups, outputs]; `g_idx` [inputs] says the group of each input, in any order if
desc_act is set. In the format `gptq` the stored zero points are smaller by one, so that they are from 1 to 2^bits; `gptq_v2` has
the zero points themselves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from text_generation_shard.engines.torch.weights.quantization.format import (
    WIDE,
    StoredTensor,
    UnsupportedSchemeError,
    group_index,
    groups_of,
    sibling,
    two_dimensions,
)
from text_generation_shard.engines.torch.weights.quantization.formats.integers import (
    WORD_BITS,
    GroupedIntegers,
    check_bits,
    check_group_size,
    unpacked_range,
)

VERSIONS = {"gptq": 1, "gptq_v2": 2}


@dataclass(frozen=True, slots=True)
class GptqFormat(GroupedIntegers):
    zero_offset: bool = True
    """True: the stored zero points are smaller by one. They are stored also if they are all the same."""

    @property
    def label(self) -> str:
        return f"GPTQ int{self.bits} g{self.group_size}"

    def stored(self, name: str, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        outputs, inputs = two_dimensions(name, shape)
        per_word = WORD_BITS // self.bits
        if outputs % per_word or inputs % per_word:
            raise UnsupportedSchemeError(f"{name} is {outputs} × {inputs}: GPTQ packs multiples of {per_word}")
        groups = groups_of(inputs, self.group_size)
        words, index = (torch.int32,), (torch.int32, torch.int64)
        in_order = groups == 1 or not self.desc_act
        return {
            "qweight": StoredTensor((sibling(name, "qweight"),), ((inputs // per_word, outputs),), words),
            "qzeros": StoredTensor((sibling(name, "qzeros"),), ((groups, outputs // per_word),), words),
            "scales": StoredTensor((sibling(name, "scales"),), ((groups, outputs),), WIDE),
            "g_idx": StoredTensor((sibling(name, "g_idx"),), ((inputs,),), index, optional=in_order),
        }

    def check(self, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> None:
        check_groups(tensors.get("g_idx"), tensors["scales"].shape[0], "g_idx")

    def codes(self, tensors: Mapping[str, Tensor], rows: slice, columns: slice) -> Tensor:
        return unpacked_range(tensors["qweight"][:, rows], self.bits, 0, columns).t()

    def zeros(self, tensors: Mapping[str, Tensor], rows: slice) -> Tensor:
        return unpacked_range(tensors["qzeros"], self.bits, 1, rows).t().short() + (1 if self.zero_offset else 0)

    def scales(self, tensors: Mapping[str, Tensor], rows: slice) -> Tensor:
        return tensors["scales"][:, rows].t()

    def order(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        g_idx = tensors.get("g_idx")
        in_order = g_idx is None or torch.equal(g_idx.long(), group_index(slice(0, len(g_idx)), self.group_size))
        return None if in_order else g_idx


def check_groups(g_idx: Tensor | None, groups: int, name: str) -> None:
    """Raise UnsupportedSchemeError if an input has a group that does not exist."""
    if g_idx is not None and not (int(g_idx.min()) >= 0 and int(g_idx.max()) < groups):
        raise UnsupportedSchemeError(
            f"{name} has values from {int(g_idx.min())} to {int(g_idx.max())}, and there are {groups} groups"
        )


def read_gptq(given: Mapping[str, Any]) -> GptqFormat:
    version = str(given.get("checkpoint_format") or given.get("format") or "gptq")
    if version not in VERSIONS:
        raise UnsupportedSchemeError(f"gptq: checkpoint_format {version[:50]} is not supported, only gptq, gptq_v2")
    if (words := given.get("pack_dtype") or "int32") != "int32":
        raise UnsupportedSchemeError(f"gptq: pack_dtype {str(words)[:50]} is not supported, only int32")
    if given.get("is_marlin_format"):
        raise UnsupportedSchemeError("gptq: the format of Marlin is not supported, convert it to gptq")
    if given.get("adapter"):
        raise UnsupportedSchemeError("gptq: an adapter is not supported")
    return GptqFormat(
        bits=check_bits("gptq", given.get("bits")),
        group_size=check_group_size("gptq", given.get("group_size")),
        zero_offset=VERSIONS[version] == 1,
        symmetric=given.get("sym", True) is True,
        desc_act=given.get("desc_act", False) is not False,
    )


def gptq_ignored(given: Mapping[str, Any]) -> list[str]:
    """Return the modules that `dynamic` excludes (rules `-:expression`). Raises for rules that change a module's format."""
    rules = given.get("dynamic") or {}
    if not isinstance(rules, dict) or not all(str(rule).startswith("-:") for rule in rules):
        raise UnsupportedSchemeError("gptq: dynamic is supported only with rules that exclude modules (-:…)")
    return ["re:.*?(?:" + rule.removeprefix("-:") + ")" for rule in rules]
