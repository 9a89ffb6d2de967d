"""The FP8 KV cache that the settings ask for, and its scales in the checkpoint.

compressed-tensors, ModelOpt, AutoFP8 and Quark name them differently. A key or value is the stored number times a scale, of its
tensor or of its head.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from text_generation_common.log import log
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.batch.kv_cache import FP8_DTYPES, Fp8Cache
from text_generation_shard.engines.torch.parallel.tensor_parallel import ShardRange
from text_generation_shard.engines.torch.weights.checkpoint import Checkpoint

CAPABILITY = {"fp8_e4m3fn": (8, 9), "fp8_e5m2": (8, 0)}
"""Lowest compute capability of the GPUs for which Triton converts these numbers."""
NAMES = (
    ("k_scale", "k_proj.k_scale", "qkv_proj.k_scale", "k_proj.output_scale", "kv_scale"),
    ("v_scale", "v_proj.v_scale", "qkv_proj.v_scale", "v_proj.output_scale", "kv_scale"),
)
"""Names of the scales of keys and of values in an attention module."""


def fp8_cache(
    config: ShardConfig, kv_heads: Mapping[int, ShardRange], device: torch.device, attention: str = "self_attn"
) -> Fp8Cache | None:
    """Return the FP8 cache, with the scales of this rank's KV heads; None: the cache has the model's dtype.

    `kv_heads` are those of each layer with attention, whose module is named `attention`. Without them the names of the layers are
    not known. Raises EngineError.
    """
    checkpoint = None if config.load_format == "dummy" else Checkpoint(Path(config.model_path), text_only=True)
    ends = tuple(f".{attention}.{name}" for names in NAMES for name in names)
    is_scaled = checkpoint is not None and any(name.endswith(ends) for name in checkpoint.names)
    if config.kv_cache_dtype == "auto":
        if is_scaled:
            log.info("the scales of the KV cache are not used", reason="--kv-cache-dtype is auto")
        return None
    asked = f"--kv-cache-dtype {config.kv_cache_dtype}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY[config.kv_cache_dtype]:
        raise EngineError(f"{asked}: {torch.cuda.get_device_name(device)} is too old for these numbers")
    dtype = FP8_DTYPES[config.kv_cache_dtype]
    if checkpoint is None or not is_scaled:
        return Fp8Cache(dtype)
    if not kv_heads:
        raise EngineError(f"{asked}: the scales of this checkpoint are not served where transformers runs the model")
    return Fp8Cache(dtype, _read_scales(checkpoint, kv_heads, device, attention))


def _read_scales(
    checkpoint: Checkpoint, kv_heads: Mapping[int, ShardRange], device: torch.device, attention: str
) -> dict[int, Tensor]:
    """Return the scales of the layers that have any, by their number among those with attention."""
    scales: dict[int, Tensor] = {}
    for number, (layer, heads) in enumerate(kv_heads.items()):
        prefix = f"model.layers.{layer}.{attention}."
        found = [next((prefix + each for each in names if prefix + each in checkpoint), None) for names in NAMES]
        if any(found):
            scales[number] = torch.stack([_scales(checkpoint, name, heads) for name in found]).to(device)
    return scales


def _scales(checkpoint: Checkpoint, name: str | None, heads: ShardRange) -> Tensor:
    """Return a scale for each head of this rank: 1 without a tensor."""
    if name is None:
        return torch.ones(heads.length)
    scales = checkpoint.map([name])[name].float().flatten()
    if scales.numel() not in (1, heads.total):
        raise EngineError(
            f"{checkpoint.path(name)}: {name} has {scales.numel()} scales, not 1 or one for each of {heads.total} heads"
        )
    if not bool((scales.isfinite() & (scales > 0)).all()):
        raise EngineError(f"{checkpoint.path(name)}: {name} has a scale that is not a positive number")
    return scales.expand(heads.total)[heads.start : heads.start + heads.length]
