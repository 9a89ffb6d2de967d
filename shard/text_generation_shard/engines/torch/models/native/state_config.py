"""The layers with a state of a config.json: their kind, their sizes, and the layers that have one instead of attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from reprlib import repr as shortened
from typing import Literal

from text_generation_shard.json_object import JsonObject

ATTENTION_TYPES = ("full_attention", "attention")


@dataclass(frozen=True, slots=True)
class StateFamily:
    """The layers with a state of a model_type: names in its checkpoints and config, with defaults of fields that may be omitted."""

    kind: Literal["delta_net"]
    module: str
    """The module of the layer in a checkpoint."""
    fields: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """For each size of StateConfig, its field and the default."""
    attention_interval: int = 1
    """Without layer_types, each n-th layer has attention."""
    fused: bool = False
    """True: one projection has all parts of each group of heads (Qwen3-Next); False: one for each part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateConfig:
    """The layers with a state of a model, with the heads of all ranks."""

    family: StateFamily
    layers: tuple[bool, ...]
    """For each layer, True if it has a state."""
    attention: tuple[bool, ...]
    """For each layer, True if it has attention."""
    taps: int
    """Tokens that the convolution reads, including its own."""
    groups: int
    """Heads of queries and keys."""
    heads: int
    key_width: int
    value_width: int

    @property
    def keys(self) -> int:
        """Columns of the keys of all groups."""
        return self.groups * self.key_width

    @property
    def values(self) -> int:
        """Columns of the values of all heads."""
        return self.heads * self.value_width

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of the recurrences of a sequence."""
        return sum(self.layers) * self.heads * self.key_width * self.value_width * 4

    @property
    def layer_outputs(self) -> int:
        """Outputs of the projections of a layer, with its output projection: the weights per value of a hidden state."""
        return 2 * self.keys + 3 * self.values + 2 * self.heads


DELTA_NET_FIELDS = {
    "taps": ("linear_conv_kernel_dim", 4),
    "groups": ("linear_num_key_heads", 16),
    "heads": ("linear_num_value_heads", 32),
    "key_width": ("linear_key_head_dim", 128),
    "value_width": ("linear_value_head_dim", 128),
}


def read_states(raw: JsonObject, family: StateFamily | None, num_layers: int) -> StateConfig | None:
    """Read the layers with a state of a config.json; None without. Raises EngineError with a one-line message."""
    if family is None:
        return None
    attention = _attention_layers(raw, family, num_layers)
    sizes = {name: raw.count(key, default) for name, (key, default) in family.fields.items()}
    if sizes["heads"] % sizes["groups"]:
        raise raw.error(f"{sizes['heads']} heads of values cannot share {sizes['groups']} heads of keys")
    if sizes["taps"] < 2:
        raise raw.unsupported(f"{family.fields['taps'][0]} is 1: the convolution reads no earlier token")
    return StateConfig(family=family, layers=tuple(not each for each in attention), attention=attention, **sizes)


def _attention_layers(raw: JsonObject, family: StateFamily, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer if it has attention."""
    types = raw.get("layer_types")
    if types is None:
        interval = raw.count("full_attention_interval", family.attention_interval)
        return tuple((index + 1) % interval == 0 for index in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers:
        raise raw.error(f"layer_types must name {num_layers} layers")
    known = (*ATTENTION_TYPES, "linear_attention")
    if unknown := [kind for kind in types if kind not in known]:
        raise raw.unsupported(f"layer types {shortened(unknown[:1])} are not supported")
    if not set(types) & set(ATTENTION_TYPES):
        raise raw.unsupported("layer_types has no layer with attention")
    return tuple(kind in ATTENTION_TYPES for kind in types)
