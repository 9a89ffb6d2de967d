"""The library's image encoders on a GPU, with our kernel for their rotary positions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from full_grid import full
from PIL import Image
from vision_models import VisionModel, vision_configs

from text_generation_shard.config import ShardConfig
from text_generation_shard.engines.torch.models.huggingface import image_rope
from text_generation_shard.engines.torch.models.huggingface.images import LibraryImages, load_images

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="CPUs run the library's operations, which other tests check"
)

SIZES = (70, 45), (31, 90), (64, 64)
FAST = ROTATED = ("qwen3_vl", "glm4v")


def images(width: int, height: int) -> Image.Image:
    return Image.effect_noise((width, height), 90.0).convert("RGB")


def encoded(model: LibraryImages, inputs: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [rows.float().cpu() for rows in model.encode(inputs, 2)]


@pytest.mark.parametrize("name", [name if name in FAST else full(name) for name in vision_configs()])
def test_images_are_encoded_as_on_a_cpu(name: str, tmp_path: Path) -> None:
    config = ShardConfig(model_path=VisionModel(name, tmp_path).folder, device="cpu")
    reference = load_images(config, torch.float32, torch.device("cpu"))
    inputs = [reference._pixels.begun(images(*size)) for size in SIZES]
    expected = [rows for each in inputs for rows in encoded(reference, [each])]

    for dtype, tolerance in ((torch.float32, 1e-2), (torch.bfloat16, 0.1)):
        model = load_images(config, dtype, torch.device("cuda"))
        if name in ROTATED:
            modeling = sys.modules[f"transformers.models.{name}.modeling_{name}"]
            assert modeling.apply_rotary_pos_emb_vision.__module__ == image_rope.__name__
        for found, wanted in zip([encoded(model, [each])[0] for each in inputs], expected, strict=True):
            assert (found - wanted).norm() < tolerance * wanted.norm()
