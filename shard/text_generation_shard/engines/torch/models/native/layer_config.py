"""Reads the heads of each layer of a config.json, and the size of its MLPs."""

from collections.abc import Mapping
from dataclasses import replace
from reprlib import repr as shortened
from typing import Any

from text_generation_shard.engines.torch.batch.kv_cache import LayerShape
from text_generation_shard.engines.torch.models.native.family import Family, Wrapper
from text_generation_shard.json_object import JsonObject

KEYS_AS_VALUES = "attention_k_eq_v"
BY_LAYER = "per_layer_config"
"""The object of transformers 5 with the fields in which layers differ, by the number of the layer, such as "05"."""
LAYER_FIELDS = ("head_dim", "num_key_value_heads")


def read_layers(
    raw: JsonObject, family: Family, windows: tuple[int | None, ...], num_heads: int, head_dim: int
) -> tuple[LayerShape, ...]:
    """Return the attention of each layer. `windows` are their sliding windows, `head_dim` is the one of config.json."""
    kv_heads_default = num_heads if raw.is_null("num_key_value_heads") else family.num_kv_heads or num_heads
    usual = head_dim, raw.count("num_key_value_heads", kv_heads_default)
    full = usual
    if family.full_head_dim is not None:
        full = raw.count("global_head_dim", family.full_head_dim), usual[1]
        if raw.flag(KEYS_AS_VALUES, default=False):
            full = full[0], raw.count("num_global_key_value_heads", usual[1])
    changes = _changes(raw, len(windows)) if family.full_head_dim is not None else None
    layers = []
    for index, window in enumerate(windows):
        width, num_kv_heads = full if window is None and changes is None else usual
        if changes is not None and index in changes:
            own = JsonObject(raw.path, changes[index])
            width, num_kv_heads = own.count("head_dim", width), own.count("num_key_value_heads", num_kv_heads)
        if num_heads % num_kv_heads:
            raise raw.error(f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads")
        if width % 2:
            raise raw.error(f"head_dim {width} is odd, rotary embeddings need pairs")
        layers.append(LayerShape(num_heads, num_kv_heads, width, window))
    return tuple(layers)


def with_images(layers: tuple[LayerShape, ...], wrapper: Wrapper | None, raw: JsonObject) -> tuple[LayerShape, ...]:
    """Return the attention of layers with the rules of a model of text and images; `raw` is the config of its text part."""
    kind = "none" if wrapper is None else wrapper.bidirectional_images
    in_windows = kind == "layers with a window" and raw.get("use_bidirectional_attention") == "vision"
    return tuple(
        replace(layer, bidirectional_images=kind == "all layers" or (in_windows and layer.window is not None))
        for layer in layers
    )


def _changes(raw: JsonObject, num_layers: int) -> Mapping[int, Mapping[str, Any]] | None:
    """Return the changed fields of layers, by their numbers; None if config.json does not say."""
    if BY_LAYER not in raw:
        return None
    changes = raw.inner(BY_LAYER).values
    for layer, fields in changes.items():
        if not layer.isdecimal() or int(layer) >= num_layers or not isinstance(fields, dict):
            raise raw.error(f"{BY_LAYER} must hold objects for some of {num_layers} layers")
        if unknown := [name for name in fields if name not in LAYER_FIELDS]:
            raise raw.error(f"{BY_LAYER}: {shortened(unknown[0])} is not supported, only {', '.join(LAYER_FIELDS)}")
    return {int(layer): fields for layer, fields in changes.items()}


def read_intermediate_size(raw: JsonObject, family: Family) -> int:
    """Return the inner size of the dense MLPs; of LFM2, as Lfm2MLP computes it."""
    size = raw.count(family.intermediate_field, family.intermediate_size)
    if not family.adjusts_intermediate:
        return size
    if not raw.flag("block_auto_adjust_ff_dim", default=True):
        return size
    size = int(raw.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    if not size:
        raise raw.error(f"{family.intermediate_field} leaves no inner values of an MLP")
    multiple = raw.count("block_multiple_of", 256)
    return -(-size // multiple) * multiple
