"""Engines of tiny models of text and images, and the limits of their steps."""

from __future__ import annotations

from pathlib import Path

from vision_models import VisionModel

from text_generation_proto.values import WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.engine.engine import TorchEngine


def limits() -> WarmUpLimits:
    return WarmUpLimits(max_batch_total_tokens=8192, max_batch_prefill_tokens=128)


def vision_engine(vision: VisionModel) -> TorchEngine:
    engine = build_engine(ShardConfig(model_path=vision.folder, device="cpu", max_batch_size=6))
    assert isinstance(engine, TorchEngine)
    return engine


def small_vision(folder: Path) -> tuple[VisionModel, TorchEngine]:
    """Return a small model in a folder, whose images have several axes and additions after layers, and its engine."""
    vision = VisionModel("qwen3_vl", folder)
    return vision, vision_engine(vision)
