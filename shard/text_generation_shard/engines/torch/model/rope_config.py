"""Reads the rotary position embeddings of a config.json, in the spellings of transformers 4 and 5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as shortened
from typing import Any

from text_generation_shard.engines.torch.model.families import Family
from text_generation_shard.json_object import JsonObject

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""`dynamic` is left out: it changes the rotation with the sequence length, so keys cannot be cached."""
LONGROPE = ("longrope", "su", "yarn")
"""The names of Phi-3's type, of which older checkpoints call it `su` or `yarn`."""
MAX_FACTORS = 1 << 12
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding; the fields are those of transformers' `rope_parameters`."""

    type: str
    """One of ROPE_TYPES, or `longrope`."""
    theta: float
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    partial: float = 1.0
    """The part of a head that is rotated."""
    interleaved: bool = False
    """True: dimensions 2i and 2i + 1 are rotated together, not i and i + half."""
    factors: tuple[float, ...] = ()
    """Divisors of the frequencies of `longrope`."""
    query_beta: float = 0.0
    """Queries are multiplied by 1 + query_beta · ln(1 + ⌊position / original_max_positions⌋) after the rotation."""

    def rotary_dim(self, head_dim: int) -> int:
        """Return the number of rotated dimensions of a head."""
        return int(head_dim * self.partial)


NO_ROPE = Rope("default", 1.0, partial=0.0)
"""No dimension is rotated."""


def read_ropes(raw: JsonObject, family: Family, windows: tuple[int | None, ...]) -> tuple[Rope, ...]:
    """Return the rotation of each layer. `windows` are the sliding windows of the layers."""
    max_positions = raw.count("max_position_embeddings", family.max_positions)
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or dict(family.rope)
    if not isinstance(given, dict):
        raise raw.error("rope_parameters must be an object")
    ropes = _by_kind(raw, family, given, max_positions)
    rotated = rotated_layers(raw, family, len(windows))
    return tuple(
        ropes[FULL if window is None else SLIDING] if has_rope else NO_ROPE
        for window, has_rope in zip(windows, rotated, strict=True)
    )


def _by_kind(raw: JsonObject, family: Family, given: Mapping[str, Any], max_positions: int) -> dict[str, Rope]:
    """Return the rotation of layers without and with a window."""
    if FULL in given or SLIDING in given:
        full, sliding = given.get(FULL) or {}, given.get(SLIDING) or {}
        if not isinstance(full, dict) or not isinstance(sliding, dict):
            raise raw.error("rope_parameters must hold an object for each kind of layers")
    else:
        # Scaling is for layers without a window, where the two kinds differ.
        full, sliding = given, {} if family.local_rope_theta is not None else given
    theta = raw.number("rope_theta", family.rope_theta)
    local_theta = theta
    if family.local_rope_theta is not None:
        local_theta = raw.number("rope_local_base_freq", family.local_rope_theta)
    return {
        FULL: _read_rope(raw, family, full, theta, max_positions),
        SLIDING: _read_rope(raw, family, sliding, local_theta, max_positions),
    }


def _read_rope(
    raw: JsonObject, family: Family, given: Mapping[str, Any], default_theta: float, max_positions: int
) -> Rope:
    kind = given.get("rope_type", given.get("type", "default"))
    if family.partial_rotary == 1.0 and kind in LONGROPE:
        kind = "longrope"
    elif kind not in ROPE_TYPES or any(isinstance(value, dict) for value in given.values()):
        raise raw.error(
            f"rope type {shortened(kind)} is not supported, only {', '.join(ROPE_TYPES)}, one for each kind of layers"
        )
    inner = JsonObject(raw.path, given, advice=f"; rope type {kind!r} needs it")
    number = inner.number
    if (theta := number("rope_theta", default_theta)) <= 1:
        raise raw.error(f"rope_theta is {theta}, not above 1")
    partial = number("partial_rotary_factor", raw.number("partial_rotary_factor", family.partial_rotary or 1.0))
    if partial > 1 or (partial != 1 and family.partial_rotary is None):
        raise raw.error(f"partial_rotary_factor {partial:g} is not supported")
    common: dict[str, Any] = {"theta": theta, "partial": partial, "interleaved": family.interleaved_rotary}
    if kind == "default":
        return Rope(kind, **common)
    if kind == "linear":
        return Rope(kind, **common, factor=number("factor"))
    key = "original_max_position_embeddings"
    original = raw.count(key) if key in raw else inner.count(key, max_positions)
    common["original_max_positions"] = original
    if kind == "longrope":
        # As in vLLM: one set of factors for all lengths, so that keys can be cached.
        if original == 1:
            raise raw.error(f"{key} is 1: longrope divides by its logarithm")
        name = "long_factor" if max_positions > original else "short_factor"
        return Rope(
            kind,
            **common,
            factor=number("factor", max_positions / original),
            attention_factor=number("attention_factor") if given.get("attention_factor") else None,
            factors=_factors(raw, name, given.get(name)),
        )
    if kind == "llama3":
        return Rope(
            kind,
            **common,
            factor=number("factor"),
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
        )
    return Rope(
        kind,
        **common,
        factor=number("factor", max_positions / original),
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        attention_factor=None if given.get("attention_factor") is None else number("attention_factor"),
        mscale=number("mscale") if given.get("mscale") else 0.0,
        mscale_all_dim=number("mscale_all_dim") if given.get("mscale_all_dim") else 0.0,
        truncate=given.get("truncate") is not False,
        query_beta=number("llama_4_scaling_beta") if given.get("llama_4_scaling_beta") else 0.0,
    )


def _factors(raw: JsonObject, name: str, given: object) -> tuple[float, ...]:
    if (
        not isinstance(given, list)
        or not 0 < len(given) <= MAX_FACTORS
        or not all(isinstance(value, int | float) and value > 0 for value in given)
    ):
        raise raw.error(f"{name} must be a list of numbers above 0")
    return tuple(map(float, given))


def rotated_layers(raw: JsonObject, family: Family, num_layers: int) -> list[bool]:
    """Return for each layer if it has a rotation."""
    given = raw.get("no_rope_layers")
    if not family.no_rope_interval:
        return [True] * num_layers
    if given is None:
        interval = raw.count("no_rope_layer_interval", family.no_rope_interval)
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(given, list) or len(given) != num_layers:
        raise raw.error(f"no_rope_layers must have {num_layers} numbers")
    # A 1 says that the layer has a rotation.
    return [bool(value) for value in given]
