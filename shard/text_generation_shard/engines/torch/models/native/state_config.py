"""The layers with a state of a config.json: their kind, their sizes, and the layers that have one instead of attention."""

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as shortened
from typing import Any, Literal

import torch

from text_generation_shard.json_object import JsonObject

ATTENTION_TYPES = ("full_attention", "attention")
STATE_DTYPES = ("float32", "bfloat16", "float16")
STATE_TYPES = ("linear_attention", "mamba", "conv")
MLP_TYPES = ("mlp", "moe")
PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""The types of layers by their letters in hybrid_override_pattern."""


@dataclass(frozen=True, slots=True)
class StateFamily:
    """The layers with a state of a model_type: names in its checkpoints and config, with defaults of fields that may be omitted."""

    kind: Literal["delta_net", "mamba", "short_convolution"]
    module: str
    """The module of the layer in a checkpoint."""
    fields: Mapping[str, tuple[str, int | None]]
    """For each size of StateConfig, its field and the default; None: config.json must have it."""
    attention_interval: int = 1
    """Without layer_types, each n-th layer has attention."""
    separate: bool = False
    """True: queries, keys and values have projections and convolutions of their own, and betas may reach 2 (OLMo Hybrid)."""
    fused: bool = False
    """True: one projection has all parts of each group of heads (Qwen3-Next); False: one for each part."""
    beside_attention: bool = False
    """True: each layer has attention and a state (Falcon-H1)."""
    activation_field: str = "hidden_act"
    single_parts: bool = False
    """True: a layer has attention, a state or an MLP, not two of them (Nemotron-H)."""
    optional_norm: bool = False
    """True: mamba_rms_norm says if outputs are normed, and mamba_norm_before_gate if before the gate; False: always, after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateConfig:
    """The layers with a state of a model, with the heads of all ranks. A short convolution alone has no heads."""

    family: StateFamily
    layers: tuple[bool, ...]
    """For each layer, True if it has a state."""
    attention: tuple[bool, ...]
    """For each layer, True if it has attention."""
    taps: int
    """Tokens that the convolution reads, including its own."""
    groups: int = 0
    """Heads of queries and keys."""
    heads: int = 0
    key_width: int = 0
    value_width: int = 0
    bias: bool = False
    """True: the projections have biases."""
    convolution_bias: bool = False
    has_norm: bool = True
    gate_first: bool = False
    """True: outputs are gated before they are normed."""
    mlps: tuple[bool, ...]
    """For each layer, True if it has an MLP."""
    least_step: float = 0.0
    dtype: torch.dtype | None = None
    """Data type of the states of recurrences between steps; None: that of the model."""
    drafts: int = 0
    """Tokens of the longest draft."""
    beta_scale: float = 1.0

    @property
    def values(self) -> int:
        """Columns of the values of all heads."""
        return self.heads * self.value_width

    def divides(self, ranks: int) -> bool:
        """Return True if ranks can have parts of the layers: whole groups of heads, or a part of one if its outputs are not normed together.

        OLMo Hybrid norms the heads of its attention together.
        """
        if self.family.kind == "short_convolution" or self.family.separate or self.heads % ranks:
            return False
        return self.groups % ranks == 0 or not (self.has_norm or ranks % self.groups)

    def layer_weights(self, hidden_size: int) -> int:
        if self.family.kind == "short_convolution":
            return 4 * hidden_size * hidden_size
        return hidden_size * (2 * self.groups * self.key_width + 3 * self.values + 2 * self.heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """Factors of the projections of a layer (Falcon-H1), which the loaded weights are multiplied with."""

    attention_in: float
    key: float
    attention_out: float
    gate: float
    down: float
    state_parts: tuple[float, ...]
    """Factors of gates, values, keys, queries and steps, times that of their input."""
    state_out: float


DELTA_NET_FIELDS = {
    "taps": ("linear_conv_kernel_dim", 4),
    "groups": ("linear_num_key_heads", 16),
    "heads": ("linear_num_value_heads", 32),
    "key_width": ("linear_key_head_dim", 128),
    "value_width": ("linear_value_head_dim", 128),
}
OLMO_FIELDS = {name: (key, 4 if name == "taps" else None) for name, (key, _) in DELTA_NET_FIELDS.items()}
"""transformers derives the sizes from those of attention, and writes them to each config.json."""
NEMOTRON_FIELDS = {
    "taps": ("conv_kernel", 4),
    "groups": ("n_groups", 8),
    "heads": ("mamba_num_heads", 128),
    "key_width": ("ssm_state_size", 128),
    "value_width": ("mamba_head_dim", 64),
}
MAMBA_FIELDS = {
    "taps": ("mamba_d_conv", 4),
    "groups": ("mamba_n_groups", 1),
    "heads": ("mamba_n_heads", 128),
    "key_width": ("mamba_d_state", 256),
}
NEMOTRON_OLDER = (
    ("mamba_n_groups", "n_groups"),
    ("mamba_d_conv", "conv_kernel"),
    ("mamba_dt_min", "time_step_min"),
    ("mamba_conv_bias", "use_conv_bias"),
    ("layer_types", "layers_block_type"),
)
SHORT_CONVOLUTION_FIELDS = {"taps": ("conv_L_cache", 3)}


def read_states(raw: JsonObject, family: StateFamily | None, num_layers: int, hidden_size: int) -> StateConfig | None:
    """Read the layers with a state of a config.json; None without. Raises EngineError with a one-line message."""
    if family is None:
        return None
    attention = _attention_layers(raw, family, num_layers)
    mlps = (True,) * num_layers
    layers = mlps if family.beside_attention else tuple(not each for each in attention)
    if family.single_parts:
        mlps = tuple(kind in MLP_TYPES for kind in raw.get("layer_types"))
        layers = tuple(not each for each in map(max, attention, mlps))
    sizes: dict[str, Any] = {name: raw.count(key, default) for name, (key, default) in family.fields.items()}
    if sizes["taps"] < 2:
        raise raw.unsupported(f"{family.fields['taps'][0]} is 1: the convolution reads no earlier token")
    flags: dict[str, Any] = {}
    if family.separate and raw.flag("linear_allow_neg_eigval", default=True):
        flags["beta_scale"] = 2.0
    if family.kind == "short_convolution":
        flags["bias"] = flags["convolution_bias"] = raw.flag("conv_bias", default=False)
    elif (activation := raw.optional_text(family.activation_field) or "silu") != "silu":
        raise raw.unsupported(f"{family.activation_field} {shortened(activation)}: convolutions have silu")
    elif sizes["heads"] % sizes["groups"]:
        raise raw.error(f"{sizes['heads']} heads of values cannot share {sizes['groups']} heads of keys")
    if family.single_parts:
        flags = {
            "bias": raw.flag("use_bias", default=False),
            "convolution_bias": raw.flag("use_conv_bias", default=True),
            "gate_first": True,
            "least_step": raw.number("time_step_min", 0.001),
        }
    elif family.kind == "mamba":
        sizes["value_width"] = _mamba_head(raw, family, sizes["heads"], hidden_size)
        flags = _mamba_flags(raw, family)
    own = _dtype(raw, torch.float32 if family.single_parts else None)
    return StateConfig(family=family, layers=layers, attention=attention, mlps=mlps, dtype=own, **sizes, **flags)


def _dtype(raw: JsonObject, default: torch.dtype | None) -> torch.dtype | None:
    """Return the data type of states that the config names: Qwen3.5 and Nemotron 3 have a field for it."""
    for key in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"):
        if (name := raw.optional_text(key)) not in (None, "auto"):
            if name not in STATE_DTYPES:
                raise raw.unsupported(f"{key} is {shortened(name)}, not {', '.join(STATE_DTYPES)}")
            found: torch.dtype = getattr(torch, name)
            return found
    return default


def with_layer_types(raw: JsonObject) -> JsonObject:
    """Return the config of a Nemotron-H with layer_types and num_hidden_layers. Raises EngineError."""
    types, pattern = raw.get("layers_block_type"), raw.optional_text("hybrid_override_pattern")
    if types is None and pattern is not None and set(pattern) <= PATTERN.keys():
        types = [PATTERN[letter] for letter in pattern]
    if not isinstance(types, list) or not types:
        raise raw.error("layers_block_type must name the layers")
    return raw.merged({"layer_types": types, "num_hidden_layers": len(types)})


def _mamba_head(raw: JsonObject, family: StateFamily, heads: int, hidden_size: int) -> int:
    """Return the values of a head: those of all heads are `mamba_d_ssm`, or the hidden size times `mamba_expand`."""
    values = hidden_size * raw.count("mamba_expand", 2)
    if family.beside_attention and not raw.is_null("mamba_d_ssm"):
        values = raw.count("mamba_d_ssm", 1024)
    if raw.get("mamba_d_head") in (None, "auto"):
        width, rest = divmod(values, heads)
    else:
        width = raw.count("mamba_d_head")
        rest = values - width * heads
    if rest:
        raise raw.error(f"{heads} heads of Mamba do not have {values} values")
    return width


def _mamba_flags(raw: JsonObject, family: StateFamily) -> dict[str, Any]:
    # The library clamps the steps of prompts, but not those of single tokens.
    limit = raw.get("time_step_limit")
    if limit is not None and (not isinstance(limit, list) or len(limit) != 2 or not _is_unlimited(*limit)):
        raise raw.unsupported(f"time_step_limit is {shortened(limit)}: only steps without a limit are supported")
    has_norm, norm_first = True, False
    if family.optional_norm:
        has_norm = raw.flag("mamba_rms_norm", default=False)
        norm_first = raw.flag("mamba_norm_before_gate", default=True)
    return {
        "bias": raw.flag("mamba_proj_bias", default=False),
        "convolution_bias": raw.flag("mamba_conv_bias", default=True),
        "has_norm": has_norm,
        "gate_first": not norm_first,
    }


def _is_unlimited(least: object, most: object) -> bool:
    """Return True for 0 and infinity, which JSON has no number for: writers use a name, or an object with one."""
    name = next(iter(most.values()), None) if isinstance(most, dict) else most
    return least == 0 and str(name).lower() in ("inf", "infinity")


def _attention_layers(raw: JsonObject, family: StateFamily, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer if it has attention."""
    if family.beside_attention:
        return (True,) * num_layers
    types, own = raw.get("layer_types"), MLP_TYPES if family.single_parts else ()
    if types is None:
        attention = _without_types(raw, family, num_layers)
    elif not isinstance(types, list) or len(types) != num_layers:
        raise raw.error(f"layer_types must name {num_layers} layers")
    elif unknown := [kind for kind in types if kind not in (*ATTENTION_TYPES, *STATE_TYPES, *own)]:
        raise raw.unsupported(f"layer types {shortened(unknown[:1])} are not supported")
    else:
        attention = tuple(kind in ATTENTION_TYPES for kind in types)
    if not any(attention):
        raise raw.error("no layer has attention: models with states alone are not served")
    return attention


def _without_types(raw: JsonObject, family: StateFamily, num_layers: int) -> tuple[bool, ...]:
    if family.kind == "delta_net":
        interval = raw.count("full_attention_interval", family.attention_interval)
        return tuple((index + 1) % interval == 0 for index in range(num_layers))
    key = "full_attn_idxs" if family.kind == "short_convolution" else "attn_layer_indices"
    indices = raw.get(key)
    if not isinstance(indices, list) or not all(type(index) is int for index in indices):
        raise raw.unsupported(f"neither layer_types nor {key} says which layers have attention")
    return tuple(index in indices for index in range(num_layers))


def read_multipliers(raw: JsonObject) -> Multipliers:
    """Read the factors of a Falcon-H1. Raises EngineError."""

    def numbers(key: str, count: int) -> tuple[float, ...]:
        values = raw.numbers(key, count) if key in raw else (1.0,) * count
        if len(values) != count:
            raise raw.error(f"{key} must have {count} numbers")
        return values

    gate, down = numbers("mlp_multipliers", 2)
    state_in = raw.number("ssm_in_multiplier", 1.0)
    return Multipliers(
        attention_in=raw.number("attention_in_multiplier", 1.0),
        key=raw.number("key_multiplier", 1.0),
        attention_out=raw.number("attention_out_multiplier", 1.0),
        gate=gate,
        down=down,
        state_parts=tuple(state_in * part for part in numbers("ssm_multipliers", 5)),
        state_out=raw.number("ssm_out_multiplier", 1.0),
    )
