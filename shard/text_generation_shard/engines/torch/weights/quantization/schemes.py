"""The quantization of a checkpoint: which modules have which format of weights, read from its config."""

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

ALL_MODULES = ("*",)
ONLINE_MODULES = ("*_proj",)
"""The modules that are quantized while a checkpoint without quantization is loaded."""

Rules = tuple[tuple[tuple[str, ...], WeightFormat], ...]
"""Modules and their format; the first rule that matches a module counts."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """The formats of a checkpoint's weights."""

    method: str
    """The config's quant_method."""
    rules: Rules
    ignored: tuple[str, ...] = ()
    """Modules that are not quantized: names, patterns with *, or regular expressions after `re:`."""
    online: bool = False
    """True: the checkpoint is not quantized, rows are quantized while they are loaded."""

    @property
    def label(self) -> str:
        """The method and the formats in words, for example `gptq (GPTQ int4 g128)`."""
        formats = ", ".join(dict.fromkeys(weights.label for _, weights in self.rules)) or "KV cache"
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
    weights, ignored = _READERS[method](given)
    rules = ((ALL_MODULES, weights),) if isinstance(weights, WeightFormat) else weights
    return Scheme(method, rules, ignored)


def online_fp8() -> Scheme:
    """Return the scheme of a checkpoint whose rows are quantized to FP8 while it is loaded."""
    weights = Fp8Format(scale_per_row=True, static_inputs=False)
    return Scheme("fp8", ((ONLINE_MODULES, weights),), online=True)


def choose_scheme(found: Scheme | None, asked: str | None) -> Scheme | None:
    """Return the scheme of the checkpoint, or that of --quantize if it has none. Raises UnsupportedSchemeError if the two differ."""
    if asked is None:
        return found
    if found is None:
        if asked == "fp8":
            return online_fp8()
        raise UnsupportedSchemeError(
            f"--quantize {asked}: the checkpoint is not quantized, only fp8 is done at load time"
        )
    is_fp8 = bool(found.rules) and all(isinstance(weights, Fp8Format | Fp8BlockFormat) for _, weights in found.rules)
    agreed = {
        found.method,
        *(f"{found.method}-{each.kind}" for _, each in found.rules if isinstance(each, FourBitFormat)),
    }
    if asked not in agreed and not (asked == "fp8" and is_fp8):
        raise UnsupportedSchemeError(f"--quantize {asked}: the checkpoint is quantized as {found.label}")
    return found


def _modelopt(given: Mapping[str, Any]) -> WeightFormat:
    algorithm = str(given.get("quant_algo"))
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
    return formats[algorithm]


def _fp8(given: Mapping[str, Any]) -> WeightFormat:
    activations = given.get("activation_scheme") or "dynamic"
    if activations not in ("dynamic", "static"):
        raise UnsupportedSchemeError(f"fp8: activation_scheme {str(activations)[:50]} is not supported")
    if (kind := given.get("fmt") or "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise UnsupportedSchemeError(f"fp8: fmt {str(kind)[:50]} is not supported, only e4m3")
    if (block := given.get("weight_block_size")) is not None:
        return Fp8BlockFormat(read_block("fp8: weight_block_size", block))
    return Fp8Format(scale_per_row=False, static_inputs=activations == "static")


def _gptq(given: Mapping[str, Any]) -> WeightFormat | Rules:
    """Read a config of GPTQ. optimum's may name the modules that are quantized in each layer, in lists of those done together."""
    weights, steps = read_gptq(given), given.get("modules_in_block_to_quantize") or []
    if not isinstance(steps, list) or not all(isinstance(step, list) for step in steps):
        raise UnsupportedSchemeError("gptq: modules_in_block_to_quantize is not a list of lists")
    modules = parts_of_names([name for step in steps for name in step])
    return ((modules, weights),) if modules else weights


def _auto_round(given: Mapping[str, Any]) -> tuple[WeightFormat, tuple[str, ...]]:
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
    return weights, module_names(wide)


def _quark(given: Mapping[str, Any]) -> WeightFormat:
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
    return Fp8Format(scheme == "per_channel", static_inputs=is_static, weight_only=inputs is None)


def _kept(given: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """Return the modules that are not quantized, by `modules_to_not_convert` or another key, as parts of their names."""
    return tuple(pattern for key in keys or ("modules_to_not_convert",) for pattern in parts_of_names(given.get(key)))


_READERS: dict[str, Callable[[Mapping[str, Any]], tuple[WeightFormat | Rules, tuple[str, ...]]]] = {
    "fp8": lambda given: (_fp8(given), _kept(given, "modules_to_not_convert", "ignored_layers")),
    "gptq": lambda given: (_gptq(given), module_names(gptq_ignored(given)) + _kept(given)),
    "awq": lambda given: (read_awq(given), _kept(given)),
    "compressed-tensors": lambda given: (read_groups(given), module_names(given.get("ignore"))),
    "mxfp4": lambda given: (((("*.experts.*",), GptOssMxfp4Format()),), _kept(given)),
    "modelopt": lambda given: (_modelopt(given), module_names(given.get("ignore") or given.get("exclude_modules"))),
    "auto-round": _auto_round,
    "fbgemm_fp8": lambda given: (Fp8Format(scale_per_row=True, static_inputs=False), _kept(given)),
    "quark": lambda given: (_quark(given), module_names(given.get("exclude"))),
    "bitsandbytes": lambda given: (read_bitsandbytes(given), _kept(given, "llm_int8_skip_modules")),
}
"""Return the format of all modules or the rules, and the modules that are not quantized."""
