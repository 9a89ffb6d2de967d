"""Reads the config groups of compressed-tensors, which llm-compressor writes: each has modules and one format of weights.

Activations are quantized only where the product is FP8; for the other formats the weights alone are.
"""

from collections.abc import Mapping
from typing import Any

from text_generation_shard.engines.torch.weights.quantization.format import UnsupportedSchemeError, WeightFormat
from text_generation_shard.engines.torch.weights.quantization.formats.float4 import (
    MXFP4_GROUP,
    NVFP4_GROUP,
    Mxfp4Format,
    Nvfp4Format,
)
from text_generation_shard.engines.torch.weights.quantization.formats.float8 import (
    Fp8BlockFormat,
    Fp8Format,
    read_block,
)
from text_generation_shard.engines.torch.weights.quantization.formats.integers import check_bits, check_group_size
from text_generation_shard.engines.torch.weights.quantization.formats.packed_integers import (
    Int8Format,
    PackedIntegerFormat,
)
from text_generation_shard.engines.torch.weights.quantization.modules import REGEX, module_names

METHOD = "compressed-tensors"
LINEAR = "Linear"
"""The target that means all linear layers."""
MAX_GROUPS = 16
FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
)


def read_groups(given: Mapping[str, Any]) -> tuple[tuple[tuple[str, ...], WeightFormat], ...]:
    """Return the format of each target. As in the library, names come before expressions, and these before all linear layers."""
    groups = given.get("config_groups")
    fewest = 0 if given.get("kv_cache_scheme") else 1  # scales of keys and values alone
    if not isinstance(groups, dict) or not fewest <= len(groups) <= MAX_GROUPS:
        raise UnsupportedSchemeError(f"{METHOD}: config_groups must be an object of 1 to {MAX_GROUPS} groups")
    if given.get("transform_config"):
        raise UnsupportedSchemeError(f"{METHOD}: transform_config is not supported")
    sparsity = given.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise UnsupportedSchemeError(f"{METHOD}: sparsity_config is not supported")
    rules: list[tuple[str, WeightFormat]] = []
    for group in groups.values():
        if not isinstance(group, dict):
            raise UnsupportedSchemeError(f"{METHOD}: a config group must be an object")
        targets = module_names(group.get("targets"))
        if not targets:
            raise UnsupportedSchemeError(f"{METHOD}: a config group without targets is not supported")
        weights = _weights(group, group.get("format") or given.get("format"))
        rules += [(target, weights) for target in targets]
    rules.sort(key=lambda rule: (rule[0] == LINEAR, rule[0].startswith(REGEX), rule[0]))
    return tuple((("*" if target == LINEAR else target,), weights) for target, weights in rules)


def _weights(group: Mapping[str, Any], name: object) -> WeightFormat:
    weights, inputs = group.get("weights"), group.get("input_activations")
    if group.get("output_activations"):
        raise UnsupportedSchemeError(f"{METHOD}: output_activations are not supported")
    if name is not None and name not in FORMATS:
        raise UnsupportedSchemeError(f"{METHOD}: format {str(name)[:50]} is not supported, only {', '.join(FORMATS)}")
    if not isinstance(weights, dict):
        raise UnsupportedSchemeError(f"{METHOD}: weights {_words(weights)} are not supported")
    kind = (weights.get("type") or "int", weights.get("num_bits"))
    if weights.get("dynamic"):
        raise UnsupportedSchemeError(f"{METHOD}: weights {_words(weights)} with dynamic scales are not supported")
    if kind[0] == "int":
        return _integers(weights, name)
    if weights.get("symmetric") is False:
        raise UnsupportedSchemeError(f"{METHOD}: weights {_words(weights)} with zero points are not supported")
    if kind == ("float", 4):
        return _float4(weights)
    if kind == ("float", 8):
        return _float8(weights, inputs)
    raise UnsupportedSchemeError(f"{METHOD}: weights {_words(weights)} are not supported")


def _integers(weights: Mapping[str, Any], name: object) -> WeightFormat:
    bits, strategy, symmetric = weights.get("num_bits"), weights.get("strategy"), weights.get("symmetric", True)
    size = {"channel": -1, "tensor": 0}.get(str(strategy))
    if strategy == "group" or (strategy is None and weights.get("group_size")):
        size = check_group_size(METHOD, weights.get("group_size"))
    is_packed = name == "pack-quantized" or (name != "int-quantized" and bits == 4)
    if size is None or (size == 0 and is_packed) or not isinstance(symmetric, bool):
        raise UnsupportedSchemeError(f"{METHOD}: weights {_words(weights)} are not supported")
    if is_packed:
        in_order = weights.get("actorder") in (None, False, "weight", "static")
        return PackedIntegerFormat(check_bits(METHOD, bits), size, symmetric, desc_act=not in_order)
    if bits != 8:
        raise UnsupportedSchemeError(f"{METHOD}: weights {_words(weights)} are not supported")
    return Int8Format(size, symmetric)


def _float4(weights: Mapping[str, Any]) -> WeightFormat:
    kind = weights.get("strategy"), weights.get("group_size")
    if kind == ("tensor_group", NVFP4_GROUP):
        return Nvfp4Format(modelopt=False)
    if kind == ("group", MXFP4_GROUP):
        return Mxfp4Format()
    raise UnsupportedSchemeError(f"{METHOD}: weights {_words(weights)} are not supported, only NVFP4 and MXFP4")


def _float8(weights: Mapping[str, Any], inputs: object) -> WeightFormat:
    strategy = weights.get("strategy")
    if strategy == "block":
        return Fp8BlockFormat(
            read_block(f"{METHOD}: block_structure", weights.get("block_structure")), in_scale_dtype=True
        )
    if strategy not in ("tensor", "channel"):
        raise UnsupportedSchemeError(f"{METHOD}: weights {_words(weights)} are not supported")
    if inputs is None:
        return Fp8Format(strategy == "channel", static_inputs=False, in_scale_dtype=True, weight_only=True)
    is_float8 = isinstance(inputs, dict) and (inputs.get("type"), inputs.get("num_bits")) == ("float", 8)
    if not isinstance(inputs, dict) or not is_float8 or inputs.get("symmetric") is False:
        raise UnsupportedSchemeError(f"{METHOD}: FP8 weights with activations {_words(inputs)} are not supported")
    dynamic = inputs.get("dynamic") is True
    if inputs.get("strategy") not in (("token", "tensor") if dynamic else ("tensor",)):
        raise UnsupportedSchemeError(f"{METHOD}: FP8 weights with activations {_words(inputs)} are not supported")
    return Fp8Format(scale_per_row=strategy == "channel", static_inputs=not dynamic, in_scale_dtype=True)


def _words(values: object) -> str:
    """Return a short description of the arguments of a quantization."""
    if not isinstance(values, dict):
        return str(values)[:50]
    size = values.get("group_size")
    return f"{values.get('type')}{values.get('num_bits')} by {values.get('strategy')}{f' of {size}' if size else ''}"[
        :100
    ]
