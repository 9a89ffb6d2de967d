"""The tokens of an image in a prompt, by model family: those that the library's processor would write.

A chat template writes a short text for each image. One token of it is replaced by the layout of the image: texts, and runs of the
token that the model replaces by what it sees. The sizes come from config.json, preprocessor_config.json and processor_config.json.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from text_generation_common.llama4_tiles import tiles
from text_generation_router.media.headers import Size

Piece = str | int
"""A text, or a number of image tokens."""
Layout = Callable[[Size], Iterator[Piece]]
"""A function of width and height. An image has the same tokens in every prompt: computed blocks of it are shared."""
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model that tell how it sees images. Keys that the library's class defaults are looked up in order."""

    config: Json
    processor: Json
    """processor_config.json."""
    images: Json
    """preprocessor_config.json, or that part of the processor's."""

    @property
    def vision(self) -> Json:
        return self.config.get("vision_config") or {}

    @property
    def patches(self) -> int:
        """The patches of a square image of the vision tower."""
        sides = [self.side(name, self.vision, default=1) for name in ("image_size", "patch_size")]
        return int(sides[0] // sides[1]) ** 2

    def side(self, name: str, *places: Json, default: int | None = None) -> int:
        """Return a number, or that of a square. Raises KeyError."""
        value = next((place[name] for place in (*places, self.images) if place.get(name) is not None), default)
        if isinstance(value, dict):
            value = value.get("height", value.get("longest_edge"))
        elif isinstance(value, list):
            value = value[0]
        if not isinstance(value, int) or value < 1:
            raise KeyError(name)
        return value

    def edge(self, *names: str, default: int | None = None) -> int:
        """Return the first of these keys of the size of images. Raises KeyError."""
        size = self.images.get("size") or {}
        value = size if isinstance(size, int) else next((size[name] for name in names if size.get(name)), default)
        if not isinstance(value, int) or value < 1:
            raise KeyError(f"size.{names[0]}")
        return value

    def leaves_first_out(self) -> bool:
        """Return True if the first feature of the vision tower is not used."""
        key = "vision_feature_select_strategy"
        return self.processor.get(key, self.config.get(key, "default")) == "default"


@dataclass(frozen=True, slots=True)
class ImageFamily:
    """The layouts of one model type."""

    layout: Callable[[ModelFiles], Layout]
    written: str = "{}"
    """The text that its chat templates write for an image; {}: the image token."""
    spelled: str = ""
    """The text that stands for `written` before it is tokenized; default: the same."""


def _qwen(files: ModelFiles, least: int = 56 * 56, most: int = 28 * 28 * 1280, frames: int = 1) -> Layout:
    """Patches in squares of `merge_size`, as many as the sides allow within two bounds of the area, here their defaults.

    The area is that of all frames that the model sees at a time, of which an image is each.
    """
    factor = files.side("patch_size", default=14) * files.side("merge_size", default=2)
    # GLM's processors, with two frames, have bounds in `size` alone.
    bounds = files.images if frames == 1 else {}
    least = bounds.get("min_pixels") or files.edge("shortest_edge", default=least)
    most = bounds.get("max_pixels") or files.edge("longest_edge", default=most)

    def layout(size: Size) -> Iterator[Piece]:
        if frames > 1 and min(size) < factor:
            scale = max(factor / size[1], factor / size[0])
            size = int(size[0] * scale), int(size[1] * scale)
        width, height = (round(side / factor) for side in size)
        area, pixels = width * height * factor**2 * frames, size[0] * size[1] * frames
        if area > most:
            scale = math.sqrt(pixels / most)
            width, height = (max(1, math.floor(side / scale / factor)) for side in size)
        elif area < least:
            scale = math.sqrt(least / pixels)
            width, height = (math.ceil(side * scale / factor) for side in size)
        yield width * height

    return layout


def _glm(files: ModelFiles) -> Layout:
    """The same; the shorter side has at least one square."""
    return _qwen(files, 112 * 112, 28 * 28 * 15000, frames=files.side("temporal_patch_size", default=2))


def _gemma3(files: ModelFiles) -> Layout:
    tokens = files.side("image_seq_length", files.processor, default=files.config.get("mm_tokens_per_image", 256))
    return lambda size: iter((tokens,))


def _gemma4(files: ModelFiles) -> Layout:
    """The largest image of the same shape within `max_soft_tokens` squares; marks around it."""
    side = files.side("patch_size", default=16) * files.side("pooling_kernel_size", default=3)
    most = files.side("max_soft_tokens", default=280)

    def layout(size: Size) -> Iterator[Piece]:
        scale = math.sqrt(most * side**2 / (size[0] * size[1]))
        width, height = (math.floor(scale * each / side) for each in size)
        if not height:
            width, height = min(size[0] // size[1], most), 1
        elif not width:
            width, height = 1, min(size[1] // size[0], most)
        yield "<|image>"
        yield width * height
        yield "<image|>"

    return layout


def _pixtral(files: ModelFiles) -> Layout:
    """Rows, with a mark after each."""
    sizes = (files.processor, files.vision)
    patch = files.side("patch_size", *sizes) * files.side(
        "spatial_merge_size", files.processor, files.config, default=1
    )
    longest = files.edge("longest_edge", default=1024)

    def layout(size: Size) -> Iterator[Piece]:
        ratio = max(size) / longest
        if ratio > 1:
            size = math.floor(size[0] / ratio), math.floor(size[1] / ratio)
        columns, rows = ((side - 1) // patch + 1 for side in size)
        for row in range(1, rows + 1):
            yield columns
            yield "[IMG_BREAK]" if row < rows else "[IMG_END]"

    return layout


def _llava(files: ModelFiles) -> Layout:
    if files.vision.get("model_type") == "pixtral":
        return _pixtral(files)
    tokens = _clip(files)[2]
    return lambda size: iter((tokens,))


def _llava_next(files: ModelFiles) -> Layout:
    """The whole image, then its tiles without their padding, with a mark after each row of patches."""
    tile, per_tile, whole = _clip(files)
    pinpoints = files.images.get("image_grid_pinpoints") or files.config["image_grid_pinpoints"]

    def layout(size: Size) -> Iterator[Piece]:
        columns, rows = _unpadded(size, pinpoints, tile, per_tile)
        yield whole + columns * rows + rows

    return layout


def _clip(files: ModelFiles) -> tuple[int, int, int]:
    """Return the side of an image in pixels, in patches, and its features that the model uses."""
    crops = files.images.get("do_center_crop", True) and files.images.get("crop_size")
    side = files.side("crop_size") if crops else files.edge("shortest_edge", "height")
    patches = side // files.side("patch_size", files.processor, files.vision)
    classes = int(files.vision.get("model_type") == "clip_vision_model")
    further = files.processor.get("num_additional_image_tokens", classes)
    return side, patches, patches**2 + further - files.leaves_first_out()


def _llava_onevision(files: ModelFiles) -> Layout:
    """The same with at most a number of tiles' patches. Among several images it would have other tokens: shards take one."""
    tile = files.edge("height", "shortest_edge")
    tokens = files.side("num_image_tokens", files.processor, default=files.patches)
    per_tile = math.isqrt(tokens)
    left_out = files.processor.get("vision_feature_select_strategy", files.config.get("vision_feature_select_strategy"))
    whole = tokens - (left_out == "default")
    pinpoints = files.images.get("image_grid_pinpoints") or files.config["image_grid_pinpoints"]
    limit = files.processor.get("vision_aspect_ratio") or files.config.get("vision_aspect_ratio") or "anyres_max_9"
    most = int(limit.removeprefix("anyres_max_"))

    def layout(size: Size) -> Iterator[Piece]:
        columns, rows = _unpadded(size, pinpoints, tile, per_tile)
        ratio = math.sqrt(rows * columns / (most * per_tile**2))
        if ratio > 1.1:
            columns, rows = int(columns // ratio), int(rows // ratio)
        yield whole + columns * rows + rows

    return layout


def _unpadded(size: Size, pinpoints: Sequence[Sequence[int]], tile: int, per_tile: int) -> Size:
    """Return the columns and rows of patches of the best of some resolutions, given as height and width, without padding."""
    width, height = size

    def fit(point: Sequence[int]) -> tuple[int, int]:
        scale = min(point[1] / width, point[0] / height)
        used = min(int(width * scale) * int(height * scale), width * height)
        return used, used - point[0] * point[1]

    best = max(pinpoints, key=fit)
    columns, rows = best[1] // tile * per_tile, best[0] // tile * per_tile
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    return columns, rows


def _idefics3(files: ModelFiles) -> Layout:
    """Tiles in rows, each with its place, then the whole image."""
    tile, longest = files.side("max_image_size", default=364), files.edge("longest_edge", default=4 * 364)
    own = (tile // files.side("patch_size", files.vision, default=tile)) ** 2 // files.config.get(
        "scale_factor", 2
    ) ** 2
    tokens = files.side("image_seq_len", files.processor, default=own)
    splits = files.images.get("do_image_splitting", True)
    around = "<fake_token_around_image>"

    def layout(size: Size) -> Iterator[Piece]:
        columns, rows = _tiled(size, tile, longest)
        if splits and columns * rows > 1:
            for row in range(1, rows + 1):
                for column in range(1, columns + 1):
                    yield f"{around}<row_{row}_col_{column}>"
                    yield tokens
                yield "\n" if row < rows else f"\n\n{around}<global-img>"
        else:
            yield f"{around}<global-img>"
        yield tokens
        yield around

    return layout


MAX_SIDE = 4096
"""Idefics 3's limit of the longer side."""


def _tiled(size: Size, tile: int, longest: int) -> Size:
    """Return columns and rows of tiles of an image whose longer side becomes `longest`."""
    ratio = size[0] / size[1]
    wide = size[0] >= size[1]

    def shorter(longer: int, *, even: bool) -> int:
        side = int(longer / ratio) if wide else int(longer * ratio)
        return max(side + (side % 2 if even else 0), 1)

    short = shorter(longest, even=True)
    ratio = longest / short if wide else short / longest
    if longest > MAX_SIDE:
        longest, short = MAX_SIDE, shorter(MAX_SIDE, even=False)
        ratio = longest / short if wide else short / longest
    tiles = math.ceil(longest / tile)
    others = math.ceil(shorter(tiles * tile, even=False) / tile)
    return (tiles, others) if wide else (others, tiles)


def _internvl(files: ModelFiles) -> Layout:
    """Tiles of the grid nearest to the image's shape, then the whole image."""
    tile = files.edge("height")
    least, most = files.side("min_patches", default=1), files.side("max_patches", default=12)
    own = int(files.patches * files.config.get("downsample_ratio", 0.5) ** 2)
    tokens = files.side("image_seq_length", files.processor, default=own)

    def layout(size: Size) -> Iterator[Piece]:
        width, height = size
        grids = [(x, y) for x in range(1, most + 1) for y in range(1, most + 1) if least <= x * y <= most]
        best, nearest = (1, 1), math.inf
        for grid in sorted(grids, key=lambda grid: grid[0] * grid[1]):
            distance = abs(width / height - grid[0] / grid[1])
            larger = distance == nearest and width * height > 0.5 * tile**2 * grid[0] * grid[1]
            if distance < nearest or larger:
                best, nearest = grid, distance
        tiles = best[0] * best[1]
        yield "<img>"
        yield tokens * (tiles + (tiles > 1))
        yield "</img>"

    return layout


def _llama4(files: ModelFiles) -> Layout:
    """Tiles in rows with marks between them, then the whole image."""
    side, most = files.edge("height", default=336), files.side("max_patches", default=16)
    ratio = files.vision.get("pixel_shuffle_ratio", 0.5)
    tokens = (side // files.side("patch_size", files.vision, default=14)) ** 2 // round(1 / ratio**2)

    def layout(size: Size) -> Iterator[Piece]:
        columns, rows = tiles(*size, side, most)
        yield "<|image_start|>"
        for number in range(columns * rows if columns * rows > 1 else 0):
            yield tokens
            yield "<|tile_x_separator|>" if (number + 1) % columns else "<|tile_y_separator|>"
        yield "<|image|>"
        yield tokens
        yield "<|image_end|>"

    return layout


_QWEN = ImageFamily(_qwen, "<|vision_start|>{}<|vision_end|>")
_GLM = ImageFamily(_glm, "<|begin_of_image|>{}<|end_of_image|>")
_GEMMA3 = ImageFamily(_gemma3, "<start_of_image>", "\n\n<start_of_image>{}<end_of_image>\n\n")
_LLAVA, _IDEFICS3 = ImageFamily(_llava), ImageFamily(_idefics3)
FAMILIES = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN),
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v"), _GLM),
    **dict.fromkeys(("idefics3", "smolvlm"), _IDEFICS3),
    "gemma3": _GEMMA3,
    "gemma4": ImageFamily(_gemma4),
    "internvl": ImageFamily(_internvl),
    "llama4": ImageFamily(_llama4, "<|image|>", "{}"),
    "llava": _LLAVA,
    "llava_next": ImageFamily(_llava_next),
    "llava_onevision": ImageFamily(_llava_onevision),
    "mistral3": ImageFamily(_pixtral),
}
"""By `model_type` of config.json."""
