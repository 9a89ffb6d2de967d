"""The image processor of Llama 4 in Pillow: that of the library needs torchvision."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from text_generation_common.llama4_tiles import tiles


class Llama4ImageProcessor:
    """Makes square tiles of an image, and one of the whole image after several."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """`settings`: those of the library's processor."""
        self._side = int((settings.get("size") or {}).get("height", 336))
        self._most = int(settings.get("max_patches", 16))

    def __call__(self, images: Sequence[Image.Image], return_tensors: str) -> dict[str, Tensor]:
        """Return pixel_values [tiles, 3, side, side] of one image."""
        [image] = images
        side = self._side
        columns, rows = tiles(*image.size, side, self._most)
        whole = columns * side, rows * side
        # An image is not enlarged beyond a tile.
        bounds = [min(max(own, side), most) for own, most in zip(image.size, whole, strict=True)]
        across, down = (bound / own for bound, own in zip(bounds, image.size, strict=True))
        width, height = image.size
        if across < down:
            size = bounds[0], max(min(int(height * across), bounds[1]), 1)
        else:
            size = max(min(int(width * down), bounds[0]), 1), bounds[1]
        canvas = Image.new("RGB", whole)
        canvas.paste(image.resize(size, Image.Resampling.BILINEAR))
        corners = [(column * side, row * side) for row in range(rows) for column in range(columns)]
        parts = [canvas.crop((x, y, x + side, y + side)) for x, y in corners]
        if len(parts) > 1:
            parts.append(image.resize((side, side), Image.Resampling.BILINEAR))
        pixels = torch.from_numpy(np.stack([np.array(part) for part in parts])).permute(0, 3, 1, 2)
        # In the precision of the library, with its mean and deviation.
        return {"pixel_values": (pixels.to(torch.bfloat16) * (1 / 255) - 0.5) / 0.5}
