"""The orientation of a photo, as router and shard read it: it decides the sides of the image, and so its tokens."""

from contextlib import suppress
from struct import error, unpack_from

_PREFIX = b"Exif\0\0"
_NUMBERS = {3: "H", 4: "I", 6: "b", 8: "h", 9: "i"}
"""Forms of an entry's value by its type; Pillow, and so transformers, ignores an orientation of another one."""


def orientation(exif: bytes) -> int:
    """Return the orientation that the EXIF data of an image tell, 1 (upright) to 8; 1 if they tell none.

    From 5 on, width and height of the upright image are height and width of the stored one.
    """
    tiff = exif
    while tiff.startswith(_PREFIX):  # a PNG's may have one of its own
        tiff = tiff.removeprefix(_PREFIX)
    order = "<" if tiff.startswith(b"II") else ">"
    with suppress(error):  # cut off, or no EXIF
        start = unpack_from(f"{order}I", tiff, 4)[0] + 2
        (entries,) = unpack_from(f"{order}H", tiff, start - 2)
        for entry in range(start, start + 12 * entries, 12):
            tag, kind = unpack_from(f"{order}HH", tiff, entry)
            if tag == 0x0112:
                value = unpack_from(order + _NUMBERS[kind], tiff, entry + 8)[0] if kind in _NUMBERS else 1
                return value if 1 <= value <= 8 else 1
    return 1
