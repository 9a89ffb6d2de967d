"""The quantization of a checkpoint: which modules have which format of weights, read from its config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from text_generation_shard.engines.torch.weights.quantization.format import UnsupportedSchemeError, WeightFormat
from text_generation_shard.engines.torch.weights.quantization.formats.awq import read_awq
from text_generation_shard.engines.torch.weights.quantization.formats.bitsandbytes import (
    FourBitFormat,
    read_bitsandbytes,
)
from text_generation_shard.engines.torch.weights.quantization.formats.compressed_tensors import read_groups
from text_generation_shard.engines.torch.weights.quantization.formats.float4 import GptOssMxfp4Format, Nvfp4Format
from text_generation_shard.engines.torch.weights.quantization.formats.float8 import (
    Fp8BlockFormat,
    Fp8Format,
    read_block,
)
from text_generation_shard.engines.torch.weights.quantization.formats.gptq import gptq_ignored, read_gptq
from text_generation_shard.engines.torch.weights.quantization.modules import matches_any, module_names, parts_of_names

KV_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo")
"""Keys of a checkpoint's KV cache quantization."""
ALL_MODULES = ("*",)
ONLINE_MODULES = ("*_proj",)
"""The modules that are quantized while a checkpoint without quantization is loaded."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """The formats of a checkpoint's weights."""

    method: str
    """The config's quant_method."""
    rules: tuple[tuple[tuple[str, ...], WeightFormat], ...]
    """Modules and their format; the first rule that matches a module counts."""
    ignored: tuple[str, ...] = ()
    """Modules that are not quantized: names, patterns with *, or regular expressions after `re:`."""
    online: bool = False
    """True: the checkpoint is not quantized, rows are quantized while they are loaded."""

    @property
    def label(self) -> str:
        """The method and the formats in words, for example `gptq (GPTQ int4 g128)`."""
        formats = ", ".join(dict.fromkeys(weights.label for _, weights in self.rules))
        return f"{self.method} ({formats}{', quantized while they are loaded' if self.online else ''})"

    def format_of(self, module: str) -> WeightFormat | None:
        """Return the format of a linear layer, for example model.layers.0.mlp.down_proj; None if it is not quantized."""
        if matches_any(module, self.ignored):
            return None
        return next((weights for modules, weights in self.rules if matches_any(module, modules)), None)


def read_scheme(given: object) -> Scheme:
    """Read the scheme of config.json's `quantization_config`, or of hf_quant_config.json's `quantization`."""
    if not isinstance(given, dict):
        raise UnsupportedSchemeError(f"quantized checkpoints ({str(given)[:100]}) are not supported")
    method = str(given.get("quant_method", "modelopt"))
    if method not in _READERS:
        raise UnsupportedSchemeError(
            f"quantized checkpoints ({method[:100]}) are not supported, only {', '.join(_READERS)}"
        )
    return _READERS[method](given)


def online_fp8() -> Scheme:
    """Return the scheme of a checkpoint whose rows are quantized to FP8 while it is loaded."""
    weights = Fp8Format(scale_per_row=True, static_inputs=False)
    return Scheme("fp8", ((ONLINE_MODULES, weights),), online=True)


def choose_scheme(found: Scheme | None, asked: str | None) -> Scheme | None:
    """Return the scheme to serve with: that of the checkpoint, or that of --quantize if the checkpoint has none.

    Raises UnsupportedSchemeError if the two differ.
    """
    if asked is None:
        return found
    if found is None:
        if asked == "fp8":
            return online_fp8()
        raise UnsupportedSchemeError(
            f"--quantize {asked}: the checkpoint is not quantized, only fp8 is done at load time"
        )
    is_fp8 = all(isinstance(weights, Fp8Format | Fp8BlockFormat) for _, weights in found.rules)
    agreed = {
        found.method,
        *(f"{found.method}-{each.kind}" for _, each in found.rules if isinstance(each, FourBitFormat)),
    }
    if asked not in agreed and not (asked == "fp8" and is_fp8):
        raise UnsupportedSchemeError(f"--quantize {asked}: the checkpoint is quantized as {found.label}")
    return found


def _modelopt(given: Mapping[str, Any]) -> Scheme:
    algorithm = str(given.get("quant_algo"))
    ignored = module_names(given.get("ignore") or given.get("exclude_modules"))
    formats: dict[str, WeightFormat] = {
        "FP8": Fp8Format(scale_per_row=False, static_inputs=True),
        "NVFP4": Nvfp4Format(modelopt=True),
    }
    if algorithm not in formats:
        raise UnsupportedSchemeError(
            f"quantized checkpoints (modelopt, {algorithm[:100]}) are not supported, only {' and '.join(formats)}"
        )
    if algorithm == "NVFP4" and (size := given.get("group_size") or 16) != 16:
        raise UnsupportedSchemeError(f"modelopt: NVFP4 with group_size {str(size)[:50]} is not supported, only 16")
    return Scheme("modelopt", ((ALL_MODULES, formats[algorithm]),), ignored)


def _fp8(given: Mapping[str, Any]) -> Scheme:
    activations = given.get("activation_scheme") or "dynamic"
    if activations not in ("dynamic", "static"):
        raise UnsupportedSchemeError(f"fp8: activation_scheme {str(activations)[:50]} is not supported")
    if (kind := given.get("fmt") or "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise UnsupportedSchemeError(f"fp8: fmt {str(kind)[:50]} is not supported, only e4m3")
    weights: WeightFormat = Fp8Format(scale_per_row=False, static_inputs=activations == "static")
    if (block := given.get("weight_block_size")) is not None:
        weights = Fp8BlockFormat(read_block("fp8: weight_block_size", block))
    ignored = parts_of_names(given.get("modules_to_not_convert")) + parts_of_names(given.get("ignored_layers"))
    return Scheme("fp8", ((ALL_MODULES, weights),), ignored)


def _gptq(given: Mapping[str, Any]) -> Scheme:
    ignored = module_names(gptq_ignored(given)) + parts_of_names(given.get("modules_to_not_convert"))
    return Scheme("gptq", ((ALL_MODULES, read_gptq(given)),), ignored)


def _awq(given: Mapping[str, Any]) -> Scheme:
    return Scheme("awq", ((ALL_MODULES, read_awq(given)),), parts_of_names(given.get("modules_to_not_convert")))


def _compressed_tensors(given: Mapping[str, Any]) -> Scheme:
    return Scheme("compressed-tensors", read_groups(given), module_names(given.get("ignore")))


def _mxfp4(given: Mapping[str, Any]) -> Scheme:
    return Scheme(
        "mxfp4", ((("*.experts.*",), GptOssMxfp4Format()),), parts_of_names(given.get("modules_to_not_convert"))
    )


def _bitsandbytes(given: Mapping[str, Any]) -> Scheme:
    ignored = parts_of_names(given.get("llm_int8_skip_modules"))
    return Scheme("bitsandbytes", ((ALL_MODULES, read_bitsandbytes(given)),), ignored)


def _auto_round(given: Mapping[str, Any]) -> Scheme:
    """Read a config of AutoRound, which packs as AutoGPTQ or AutoAWQ does."""
    packing = str(given.get("packing_format") or "auto_round:auto_gptq")
    layers = given.get("extra_config") or {}
    if not isinstance(layers, dict) or not all(isinstance(each, dict) for each in layers.values()):
        raise UnsupportedSchemeError("auto-round: extra_config is not an object of objects")
    keys = ("bits", "group_size", "sym")
    if given.get("data_type", "int") != "int":
        raise UnsupportedSchemeError(f"auto-round: data_type {str(given['data_type'])[:50]} is not supported, only int")
    wide = [name for name, each in layers.items() if isinstance(bits := each.get("bits"), int) and bits >= 16]
    for name, each in layers.items():
        if name not in wide and any(key in each and each[key] != given.get(key) for key in keys):
            raise UnsupportedSchemeError(f"auto-round: extra_config has another format for {name[:100]}")
    if packing.endswith("awq"):
        weights: WeightFormat = read_awq({**given, "zero_point": not given.get("sym", True)})
    elif packing.endswith("gptq"):
        weights = read_gptq({key: given.get(key) for key in keys} | {"sym": given.get("sym", True)})
    else:
        raise UnsupportedSchemeError(
            f"auto-round: packing_format {packing[:50]} is not supported, only GPTQ's and AWQ's"
        )
    return Scheme("auto-round", ((ALL_MODULES, weights),), module_names(wide))


def _fbgemm_fp8(given: Mapping[str, Any]) -> Scheme:
    weights = Fp8Format(scale_per_row=True, static_inputs=False)
    return Scheme("fbgemm_fp8", ((ALL_MODULES, weights),), parts_of_names(given.get("modules_to_not_convert")))


def _quark(given: Mapping[str, Any]) -> Scheme:
    """Read a config of AMD Quark with FP8 weights."""
    whole = given.get("global_quant_config")
    if not isinstance(whole, dict) or given.get("layer_quant_config") or given.get("layer_type_quant_config"):
        raise UnsupportedSchemeError("quark: only one global_quant_config is supported")
    weights, inputs = whole.get("weight"), whole.get("input_tensors")
    kinds = [each.get("dtype") for each in (weights, inputs) if isinstance(each, dict)]
    scheme = weights.get("qscheme") if isinstance(weights, dict) else None
    if scheme not in ("per_tensor", "per_channel") or set(kinds) != {"fp8_e4m3"}:
        raise UnsupportedSchemeError("quark: only FP8 weights by tensor or channel are supported")
    is_static = isinstance(inputs, dict) and not inputs.get("is_dynamic")
    found = Fp8Format(scheme == "per_channel", static_inputs=is_static, weight_only=inputs is None)
    return Scheme("quark", ((ALL_MODULES, found),), module_names(given.get("exclude")))


_READERS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "auto-round": _auto_round,
    "fbgemm_fp8": _fbgemm_fp8,
    "quark": _quark,
    "bitsandbytes": _bitsandbytes,
}
