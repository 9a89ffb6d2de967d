"""The FP8 quantization schemes of checkpoints: compressed-tensors and ModelOpt.

Both store weights in float8_e4m3fn with a scale per tensor or per row, and quantize activations to the same type, with a scale
from the checkpoint (static) or from the largest value of each token (dynamic).
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeGuard

import regex

from text_generation_shard.engine import EngineError

KV_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo")
"""Keys of a checkpoint's KV cache quantization."""
METHODS = ("compressed-tensors", "modelopt")
REGEX = "re:"
MAX_REGEXES = 16
"""Regular expressions in one list."""
REGEX_S = 0.1
"""Seconds of matching a regular expression with a module's name. A hostile one would take for ever."""


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """The projections that are in FP8, and their scales."""

    scale_per_row: bool
    """True: a weight_scale for each row of a weight (shape [outputs, 1]). False: one for the tensor."""
    static_inputs: bool
    """True: activations are scaled by the checkpoint's input_scale. False: each token by its own largest value."""
    ignored: tuple[str, ...] = ()
    """Modules that are not quantized: names, patterns with *, or regular expressions after `re:`."""

    def covers(self, module: str) -> bool:
        """Return True if the module, for example model.layers.0.mlp.down_proj, is in FP8."""
        return not any(_matches(module, pattern) for pattern in self.ignored)


class UnsupportedSchemeError(ValueError):
    """The config asks for a scheme that is not supported; the message is one line."""


def read_scheme(given: object) -> Fp8Scheme:
    """Read the scheme of config.json's `quantization_config`, or of hf_quant_config.json's `quantization`."""
    if not isinstance(given, dict):
        raise UnsupportedSchemeError(f"quantized checkpoints ({given}) are not supported")
    method = given.get("quant_method", "modelopt")
    if method == "modelopt":
        return _modelopt(given)
    if method == "compressed-tensors":
        return _compressed_tensors(given)
    raise UnsupportedSchemeError(
        f"quantized checkpoints ({method}) are not supported, only FP8 of {' and '.join(METHODS)}"
    )


def _modelopt(given: dict[str, Any]) -> Fp8Scheme:
    algorithm = given.get("quant_algo")
    if algorithm != "FP8":
        raise UnsupportedSchemeError(f"quantized checkpoints (modelopt, {algorithm}) are not supported, only FP8")
    return Fp8Scheme(
        scale_per_row=False, static_inputs=True, ignored=_names(given.get("ignore") or given.get("exclude_modules"))
    )


def _compressed_tensors(given: dict[str, Any]) -> Fp8Scheme:
    groups = given.get("config_groups")
    group = next(iter(groups.values())) if isinstance(groups, dict) and len(groups) == 1 else None
    if not isinstance(group, dict) or group.get("targets") != ["Linear"]:
        raise UnsupportedSchemeError("compressed-tensors: only one config group, of all Linear, is supported")
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not _is_fp8(weights) or weights.get("strategy") not in ("tensor", "channel"):
        raise UnsupportedSchemeError(f"compressed-tensors: weights {_words(weights)} are not supported, only FP8")
    if not _is_fp8(inputs):
        raise UnsupportedSchemeError(f"compressed-tensors: activations {_words(inputs)} are not supported, only FP8")
    if group.get("output_activations") or given.get("transform_config"):
        raise UnsupportedSchemeError("compressed-tensors: output_activations and transform_config are not supported")
    dynamic = inputs.get("dynamic") is True
    if inputs.get("strategy") not in (("token", "tensor") if dynamic else ("tensor",)):
        raise UnsupportedSchemeError(f"compressed-tensors: activations {_words(inputs)} are not supported")
    return Fp8Scheme(
        scale_per_row=weights["strategy"] == "channel", static_inputs=not dynamic, ignored=_names(given.get("ignore"))
    )


def _is_fp8(values: object) -> TypeGuard[dict[str, Any]]:
    return (
        isinstance(values, dict)
        and (values.get("num_bits"), values.get("type")) == (8, "float")
        and values.get("symmetric") is not False
    )


def _words(values: object) -> str:
    """Return a short description of a compressed-tensors scheme."""
    if not isinstance(values, dict):
        return str(values)
    return f"{values.get('type')}{values.get('num_bits')} by {values.get('strategy')}"


def _names(given: object) -> tuple[str, ...]:
    if given is None:
        return ()
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise UnsupportedSchemeError("the modules that a quantization ignores must be a list of names")
    regexes = [name.removeprefix(REGEX) for name in given if name.startswith(REGEX)]
    if len(regexes) > MAX_REGEXES:
        raise UnsupportedSchemeError(f"{len(regexes)} regular expressions of modules to ignore: at most {MAX_REGEXES}")
    for expression in regexes:
        try:
            regex.compile(expression)
        except regex.error as error:
            raise UnsupportedSchemeError(
                f"{REGEX + expression[:100]!r}, a module to ignore, is no regular expression: {error}"
            ) from None
    return tuple(given)


def _matches(module: str, pattern: str) -> bool:
    if pattern.startswith(REGEX):
        try:
            return regex.match(pattern.removeprefix(REGEX), module, timeout=REGEX_S) is not None
        except TimeoutError:
            raise EngineError(f"{pattern[:100]!r}, modules without quantization, takes too long to match") from None
    return fnmatchcase(module, pattern)
