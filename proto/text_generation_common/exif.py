"""The orientation of a photo, as router and shard read it: it decides the sides of the image, and so its tokens."""

from contextlib import suppress
from struct import error, unpack_from


def orientation(exif: bytes) -> int:
    """Return the orientation that the EXIF data of an image tell, 1 (upright) to 8; 1 if they tell none.

    From 5 on, width and height of the upright image are height and width of the stored one.
    """
    tiff = exif.removeprefix(b"Exif\0\0")
    order = "<" if tiff.startswith(b"II") else ">"
    with suppress(error):  # cut off, or no EXIF
        start = unpack_from(f"{order}I", tiff, 4)[0] + 2
        (entries,) = unpack_from(f"{order}H", tiff, start - 2)
        for entry in range(start, start + 12 * entries, 12):
            tag, _, _, value = unpack_from(f"{order}HHIH", tiff, entry)
            if tag == 0x0112:
                return value if 1 <= value <= 8 else 1
    return 1
