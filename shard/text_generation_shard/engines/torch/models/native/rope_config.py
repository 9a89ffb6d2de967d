"""Reads the rotary position embeddings of a config.json, in the spellings of transformers 4 and 5."""

from collections.abc import Mapping
from reprlib import repr as shortened
from typing import Any

from text_generation_shard.engines.torch.layers.rope import NO_ROPE, Rope
from text_generation_shard.engines.torch.models.native.family import Family
from text_generation_shard.json_object import NUMBERS, JsonObject

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
"""`dynamic` is left out: it changes the rotation with the sequence length, so keys cannot be cached."""
LONGROPE = ("longrope", "su", "yarn")
"""The names of Phi-3's type, of which older checkpoints call it `su` or `yarn`."""
MAX_FACTORS = 1 << 12
SWITCHES = ("mscale", "mscale_all_dim", "llama_4_scaling_beta")
"""Numbers that are 0 where they have no effect."""
SLIDING, FULL = "sliding_attention", "full_attention"


def read_ropes(raw: JsonObject, family: Family, windows: tuple[int | None, ...]) -> tuple[Rope, ...]:
    """Return the rotation of each layer. `windows` are the sliding windows of the layers."""
    if family.rope_switch and raw.get("position_embedding_type") != "rope":
        return (NO_ROPE,) * len(windows)
    max_positions = raw.count("max_position_embeddings", family.max_positions)
    given = next((raw.get(key) for key in ("rope_scaling", "rope_parameters") if key in raw), dict(family.rope))
    if not isinstance(given, dict):
        raise raw.error("rope_parameters must be an object")
    if given.get("rope_theta", 0.0) is None:  # as OLMo Hybrid is released
        return (NO_ROPE,) * len(windows)
    ropes = _by_kind(raw, family, given, max_positions)
    rotated = rotated_layers(raw, family, len(windows))
    return tuple(
        ropes[FULL if window is None else SLIDING] if has_rope else NO_ROPE
        for window, has_rope in zip(windows, rotated, strict=True)
    )


def _by_kind(raw: JsonObject, family: Family, given: Mapping[str, Any], max_positions: int) -> dict[str, Rope]:
    """Return the rotation of layers without and with a window."""
    if FULL in given or SLIDING in given:
        full, sliding = ({} if given.get(kind) is None else given[kind] for kind in (FULL, SLIDING))
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
    if kind == "mrope" and family.rotary_sections is not None:
        kind = "default"
    if family.partial_rotary == 1.0 and kind in LONGROPE:
        kind = "longrope"
    elif kind not in ROPE_TYPES or any(isinstance(value, dict) for value in given.values()):
        raise raw.unsupported(
            f"rope type {shortened(kind)} is not supported, only {', '.join(ROPE_TYPES)}, one for each kind of layers"
        )
    inner = JsonObject(raw.path, given, advice=f"; rope type {kind!r} needs it")
    number = inner.number
    theta = number("rope_theta", default_theta)
    partial = number("partial_rotary_factor", raw.number("partial_rotary_factor", family.partial_rotary or 1.0))
    if partial != 1 and family.partial_rotary is None and kind != "proportional":
        raise raw.unsupported(f"partial_rotary_factor {partial:g} is not supported")
    common: dict[str, Any] = {"theta": theta, "partial": partial, "interleaved": family.interleaved_rotary}
    common["axes"] = _axes(raw, family, given)
    common["mscale_all_dim"] = _optional(inner, "mscale_all_dim") or 0.0
    if kind == "default":
        return Rope(kind, **common)
    if kind == "linear":
        return Rope(kind, **common, factor=number("factor"))
    if kind == "proportional":
        return Rope(kind, **common, factor=number("factor", 1.0))
    key = "original_max_position_embeddings"
    original = raw.count(key) if key in raw else inner.count(key, max_positions)
    common["original_max_positions"] = original
    if kind == "longrope":
        # As in vLLM: one set of factors for all lengths, so that keys can be cached.
        if original == 1:
            raise raw.error(f"{key} is 1: longrope divides by its logarithm")
        factors = {name: inner.numbers(name, MAX_FACTORS) for name in ("short_factor", "long_factor")}
        return Rope(
            kind,
            **common,
            factor=number("factor", max_positions / original),
            attention_factor=_optional(inner, "attention_factor"),
            factors=factors["long_factor" if max_positions > original else "short_factor"],
        )
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if low >= high:
            raise raw.error(f"low_freq_factor {low:g} is not below high_freq_factor {high:g}")
        return Rope(kind, **common, factor=number("factor"), low_freq_factor=low, high_freq_factor=high)
    return Rope(
        kind,
        **common,
        factor=number("factor", max_positions / original),
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        attention_factor=_optional(inner, "attention_factor"),
        mscale=_optional(inner, "mscale") or 0.0,
        truncate=inner.flag("truncate", default=True),
        query_beta=_optional(inner, "llama_4_scaling_beta") or 0.0,
    )


def _axes(raw: JsonObject, family: Family, given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the axis of each rotated pair; empty if positions have one axis."""
    if family.rotary_sections is None:
        return ()
    sections = given.get("mrope_section") or family.rotary_sections
    if (
        not isinstance(sections, list | tuple)
        or len(sections) != len(family.rotary_sections)
        or not all(type(each) is int and 0 <= each <= MAX_FACTORS for each in sections)
    ):
        raise raw.error(f"mrope_section {shortened(sections)} is not three numbers of rotated pairs")
    if not family.alternating_axes:
        return tuple(axis for axis, pairs in enumerate(sections) for _ in range(pairs))
    pairs = range(3 * max(sections))
    return tuple(pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in pairs)


def check_rope_numbers(raw: JsonObject) -> None:
    """Raise EngineError if a number of a rotation is out of its range, anywhere in a config that transformers reads."""
    waiting = [(raw, False)]
    while waiting:
        values, of_rope = waiting.pop()
        for key, value in values.values.items():
            if isinstance(value, dict):
                waiting.append((values.inner(key), of_rope or key.startswith("rope_")))
            elif value is not None and key in NUMBERS and (of_rope or key.startswith("rope_")):
                if isinstance(value, list):
                    values.numbers(key, MAX_FACTORS)
                elif key in SWITCHES:
                    _optional(values, key)
                else:
                    values.number(key)


def _optional(inner: JsonObject, key: str) -> float | None:
    """Return the number at `key`; None if it is missing, or 0, which switches off what it describes."""
    value = inner.get(key)
    return None if value is None or (value == 0 and not isinstance(value, bool)) else inner.number(key)


def rotated_layers(raw: JsonObject, family: Family, num_layers: int) -> list[bool]:
    """Return for each layer if it has a rotation."""
    given = raw.get("no_rope_layers")
    if not family.no_rope_interval:
        return [True] * num_layers
    if given is None:
        interval = raw.count("no_rope_layer_interval", family.no_rope_interval)
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(given, list) or len(given) != num_layers or not all(type(value) is int for value in given):
        raise raw.error(f"no_rope_layers must have {num_layers} whole numbers")
    # A 1 says that the layer has a rotation.
    return [bool(value) for value in given]
