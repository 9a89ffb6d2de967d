"""The size of an image from its file, without decoding it: PNG, JPEG, WebP and GIF.

This is the job of a worker for untrusted input. The first bytes decide the format, here as in the shard's decoder. A file that is
cut off, or that goes on after its end, is refused, so that it cannot be a file of another kind as well. A JPEG may go on: cameras
append previews, other pictures (MPF) and films. Nothing reads what follows its first end.
"""

import re
from collections.abc import Callable
from struct import Struct, error, unpack_from
from typing import Any

from text_generation_common.exif import orientation

SIZE = Struct(">II")
"""Width and height in pixels."""
MAX_SCANS = 100
"""Scans of a JPEG, each of which costs a decoder the time of all pixels; encoders write about 10."""
MAX_ASPECT = 100
"""Limit of the longer side divided by the shorter one; processors of models refuse or distort such images."""
_NEXT_SEGMENT = re.compile(rb"\xff[^\0\xd0-\xd7\xff]", re.DOTALL)
"""The end of the pixels of a scan: in them, 255 is followed by 0 or by the number of an interval."""
TRUNCATED, TRAILING, ANIMATED = "its file is cut off", "its file goes on after its end", "it is animated"

Size = tuple[int, int]


class BadImage(Exception):
    """The image is not read; the rest of a sentence about it."""


def measure(config: dict[str, Any]) -> Callable[[], Callable[[bytes], bytes]]:
    """Return a function that returns the job: from a file to its SIZE. `config`: `max_pixels` of an image."""
    return lambda: lambda data: SIZE.pack(*image_size(data, config["max_pixels"]))


def image_size(data: bytes, max_pixels: int) -> Size:
    """Return width and height of the upright image. Raises BadImage."""
    read = next((read for beginning, read in FORMATS.items() if data.startswith(beginning)), None)
    if read is None:
        raise BadImage("it is no PNG, JPEG, WebP or GIF")
    try:
        width, height = read(data)
    except (error, IndexError):
        raise BadImage(TRUNCATED) from None
    if not width or not height:
        raise BadImage("it has no pixels")
    if width * height > max_pixels:
        raise BadImage(f"it has {width} × {height} pixels. At most {max_pixels} pixels are supported")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise BadImage(
            f"it has {width} × {height} pixels. One side may have at most {MAX_ASPECT} times those of the other"
        )
    return width, height


def _png(data: bytes) -> Size:
    size, at, has_data, exif = (0, 0), 8, False, b""
    while True:
        length, kind = unpack_from(">I4s", data, at)
        if (at == 8) != (kind == b"IHDR"):
            raise BadImage("its header is not that of a PNG")
        at += 12 + length
        if at > len(data):
            raise BadImage(TRUNCATED)
        match kind:
            case b"IHDR":
                size = unpack_from(">II", data, 16)
            case b"eXIf":
                exif = data[at - 4 - length : at - 4]
            case b"acTL":
                raise BadImage(ANIMATED)
            case b"IDAT":
                has_data = True
            case b"IEND":
                break
    return _upright(_whole(size if has_data else (0, 0), at, data), exif)


def _jpeg(data: bytes) -> Size:
    size, at, exif, scans = None, 2, b"", 0
    while True:
        while data[at] == data[at + 1] == 0xFF:  # fill bytes
            at += 1
        mark, marker = data[at : at + 2]
        if marker == 0xD9:  # the end
            break
        if mark != 0xFF or marker < 0xC0 or 0xD0 <= marker <= 0xD8:
            raise BadImage("its segments are not those of a JPEG")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # a frame
            if size is not None or marker > 0xC2:
                raise BadImage("it is a JPEG of a kind that is not supported")
            height, width = unpack_from(">HH", data, at + 5)
            size = width, height
        end = at + 2 + unpack_from(">H", data, at + 2)[0]
        if marker == 0xE1 and data.startswith(b"Exif\0\0", at + 4):
            exif += data[at + 10 : end]
        at = end
        if marker == 0xDA:
            if (found := _NEXT_SEGMENT.search(data, end)) is None:
                raise BadImage(TRUNCATED)
            at, scans = found.start(), scans + 1
            if scans > MAX_SCANS:
                raise BadImage(f"it is a JPEG of more than {MAX_SCANS} scans")
    return _upright(size if size and scans else (0, 0), exif)


def _webp(data: bytes) -> Size:
    if data[8:12] != b"WEBP":
        raise BadImage("it is no WebP")
    end = 8 + int.from_bytes(data[4:8], "little")
    canvas, size, at, exif = None, None, 12, b""
    while at < end:
        kind, length = unpack_from("<4sI", data, at)
        start = at + 8
        if kind in (b"VP8X", b"VP8 ", b"VP8L") and (size or (kind == b"VP8X" and at > 12)):
            raise BadImage("it is a WebP of several images")
        match kind:
            case b"VP8X":
                flags = data[start]
                if flags & 2:
                    raise BadImage(ANIMATED)
                canvas = tuple(1 + int.from_bytes(data[side : side + 3], "little") for side in (start + 4, start + 7))
            case b"VP8 ":
                width, height = unpack_from("<HH", data, start + 6)
                size = width & 0x3FFF, height & 0x3FFF
            case b"VP8L":
                bits = unpack_from("<I", data, start + 1)[0]
                size = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
            case b"EXIF" if canvas and flags & 8 and not exif:
                exif = data[start : start + length]
        at = start + length + length % 2
    if canvas is not None and canvas != size:
        raise BadImage("its headers tell different sizes")
    return _upright(_whole(size or (0, 0), end, data), exif)


def _gif(data: bytes) -> Size:
    """Return the size of the canvas. The first frame is the image; it must lie on the canvas."""
    width, height, flags = unpack_from("<HHB", data, 6)
    at, frames = 13 + _gif_colors(flags), 0
    while (kind := data[at]) != 0x3B:
        at += 2
        if kind == 0x2C:  # a frame
            left, top, wide, high, flags = unpack_from("<HHHHB", data, at - 1)
            if not frames and (left + wide > width or top + high > height):
                raise BadImage("its headers tell different sizes")
            frames += 1
            at += 9 + _gif_colors(flags)
        elif kind != 0x21:  # an extension
            raise BadImage("its blocks are not those of a GIF")
        while length := data[at]:
            at += 1 + length
        at += 1
    return _whole((width, height) if frames else (0, 0), at + 1, data)


def _gif_colors(flags: int) -> int:
    """Return the bytes of the color table that `flags` announce."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _upright(size: Size, exif: bytes) -> Size:
    return size[::-1] if orientation(exif) >= 5 else size


def _whole(size: Size, end: int, data: bytes) -> Size:
    if end != len(data):
        raise BadImage(TRUNCATED if end > len(data) else TRAILING)
    return size


FORMATS: dict[bytes, Callable[[bytes], Size]] = {
    b"\x89PNG\r\n\x1a\n": _png,
    b"\xff\xd8\xff": _jpeg,
    b"RIFF": _webp,
    b"GIF87a": _gif,
    b"GIF89a": _gif,
}
"""Readers by the beginning of the file."""
