"""PixelSteps: from an image to the arguments of its encoder, by the library's processor of images.

The last steps, rescaling, normalizing and the repetition of an image as the frames of a film, make eight bytes of one. They are left
to the engine's device if the result is then the same.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

CHECKED = (70, 45), (31, 90)
"""Sizes of the images of which both results are compared."""


class PixelSteps:
    """Makes the arguments of an encoder: `begun` beside the engine, `ended` on its device."""

    def __init__(self, processor: Callable[..., Any]) -> None:
        self._processor = processor
        self._settings: dict[str, Any] = {}
        owner: Any = processor.func if isinstance(processor, partial) else processor
        draw = np.random.default_rng(0)
        images = [Image.fromarray(draw.integers(0, 256, (*size, 3), np.uint8)) for size in CHECKED]
        expected = [self.begun(image) for image in images]
        with suppress(Exception):  # a processor of another form
            # With the processor of GLM, the size of an image depends on its frames.
            frames = {"temporal_patch_size": 1} if type(owner).__name__.startswith("Qwen2VL") else {}
            self._frames: int = owner.temporal_patch_size if frames else 1
            self._scale = owner.rescale_factor if owner.do_rescale else 1.0
            parts = (owner.image_mean, owner.image_std) if owner.do_normalize else (0.0, 1.0)
            self._mean, self._deviation = (torch.tensor(each).view(-1, 1, 1) for each in parts)
            self._settings = {"do_rescale": False, "do_normalize": False, **frames}
            found = [self.ended(self.begun(image), torch.device("cpu")) for image in images]
            if all(map(_is_same, found, expected)):
                return
        self._settings = {}

    def begun(self, image: Image.Image) -> dict[str, Tensor]:
        """Return what `ended` takes, in host memory."""
        values: dict[str, Tensor] = dict(self._processor(images=[image], return_tensors="pt", **self._settings))
        if self._settings:
            values["pixel_values"] = values["pixel_values"].to(torch.uint8)
        return values

    def ended(self, begun: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Return the arguments of the encoder."""
        values = {name: each.to(device) for name, each in begun.items()}
        if self._settings:
            pixels = values["pixel_values"]  # [..., 3, height, width], or patches [..., 3 · size]
            size = pixels.shape[-2:].numel() if pixels.ndim > 3 else pixels.shape[-1] // 3
            planes = pixels.reshape(-1, 3, 1, size) * self._scale
            planes = (planes - self._mean.to(device)) / self._deviation.to(device)
            shape = *pixels.shape[:-1], self._frames * pixels.shape[-1]
            values["pixel_values"] = planes.expand(-1, -1, self._frames, -1).reshape(shape)
        return values


def _is_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.allclose(found[name].float(), each.float(), 0.0, 1e-6) for name, each in expected.items())
