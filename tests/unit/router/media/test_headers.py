"""Sizes from files as an encoder writes them, and the attacks by files: each is refused in one line."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable

import pytest
from pictures import picture
from PIL import Image, ImageOps

from text_generation_common.exif import orientation
from text_generation_router.media.headers import BadImage, image_size

MOST = 1 << 20
KINDS = ("PNG", "JPEG", "WEBP", "GIF")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(1, 1), (13, 7), (301, 200)])
def test_the_size_is_that_of_the_decoder(kind: str, size: tuple[int, int]) -> None:
    options: list[dict[str, object]] = [{}]
    options += {
        "JPEG": [{"progressive": True}, {"exif": b"Exif\0\0" + bytes(50000)}],
        "WEBP": [{"lossless": True}],
    }.get(kind, [])
    for option in options:
        for mode in ("RGB", "L") if kind == "JPEG" else ("RGB", "RGBA", "L", "P"):
            file = io.BytesIO()
            Image.effect_noise(size, 50).convert(mode).save(file, kind, **option)  # type: ignore[arg-type]
            assert image_size(file.getvalue(), MOST) == size


@pytest.mark.parametrize("turned", [*range(10), None])
def test_the_size_is_that_of_the_upright_photo(turned: int | None) -> None:
    exif = Image.Exif()
    exif[0x010F] = "maker"
    if turned is not None:
        exif[0x0112] = turned
    for endian in ("<", ">"):
        exif.endian = endian
        for kind in ("JPEG", "PNG", "WEBP"):
            file = picture(13, 7, kind=kind, exif=exif)
            assert image_size(file, MOST) == ImageOps.exif_transpose(Image.open(io.BytesIO(file))).size
    cut_off = picture(13, 7, kind="JPEG", exif=exif.tobytes()[:-30])
    assert image_size(cut_off, MOST) in ((13, 7), (7, 13))


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("kind", [1, 2, 3, 4, 6, 7, 8, 9])
def test_an_orientation_of_any_type_turns_a_photo_as_in_pillow(kind: int, order: str) -> None:
    entry = struct.pack(f"{order}HHI", 0x0112, kind, 1) + struct.pack(
        order + {1: "Bxxx", 4: "I", 6: "bxxx", 9: "i"}.get(kind, "Hxx"), 6
    )
    tiff = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}IH", 8, 1) + entry + bytes(4)
    for exif in (tiff, b"Exif\0\0" + tiff):
        plain = picture(13, 7)
        file = plain[:33] + chunk(b"eXIf", exif) + plain[33:]
        turned = ImageOps.exif_transpose(Image.open(io.BytesIO(file)))
        assert image_size(file, MOST) == turned.size
        assert (turned.size == (7, 13)) == (orientation(Image.open(io.BytesIO(file)).info["exif"]) == 6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_cut_off_anywhere_is_refused(kind: str) -> None:
    file = picture(40, 30, kind=kind)
    for length in range(len(file)):
        with pytest.raises(BadImage, match=r"cut off|no PNG|no WebP|not those of a JPEG"):
            image_size(file[:length], MOST)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes, data: bytes = b"\0" * 9) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = chunks or (chunk(b"IDAT", zlib.compress(data)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(chunks)


def frames(kind: str) -> bytes:
    file = io.BytesIO()
    images = [Image.new("RGB", (9, 9), color) for color in ("red", "blue")]
    images[0].save(file, kind, save_all=True, append_images=images[1:])
    return file.getvalue()


def changed(kind: str, change: Callable[[bytearray], object]) -> bytes:
    file = bytearray(picture(40, 30, kind=kind))
    change(file)
    return bytes(file)


def frame_header(width: int, height: int, marker: int = 0xC0) -> bytes:
    return struct.pack(">BBHBHHB", 0xFF, marker, 11, 8, height, width, 1) + bytes(3)


ATTACKS = {
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>", "no PNG, JPEG, WebP or GIF"),
    "pdf": (b"%PDF-1.7", "no PNG"),
    "tiff": (b"II*\0" + bytes(99), "no PNG"),
    "empty": (b"", "no PNG"),
    "bomb": (png(50000, 50000, data=bytes(1 << 20)), "50000 × 50000 pixels. At most"),
    "100 megapixels": (picture(2000, 2000), "2000 × 2000 pixels"),
    "largest header": (png(2**32 - 1, 2**32 - 1), "4294967295 × 4294967295 pixels"),
    "thin": (png(1, 2000), "One side may have at most 100 times"),
    "no pixels": (png(0, 9), "it has no pixels"),
    "no data": (png(9, 9, chunk(b"IEND", b"")), "it has no pixels"),
    "long chunk": (png(9, 9, struct.pack(">I4s", 2**31, b"IDAT")), "cut off"),
    "second header": (png(9, 9, chunk(b"IHDR", bytes(13))), "header is not that of a PNG"),
    "animated PNG": (frames("PNG"), "it is animated"),
    "animated WebP": (frames("WEBP"), "it is animated"),
    "PNG and ZIP": (png(9, 9) + b"PK\x03\x04", "goes on after its end"),
    "GIF and archive": (picture(9, 9, kind="GIF") + b"PK\x03\x04", "goes on after its end"),
    "WebP and script": (picture(9, 9, kind="WEBP") + b"<script>", "goes on after its end"),
    "WAV": (b"RIFF\x24\0\0\0WAVEfmt " + bytes(28), "no WebP"),
    "WebP of two sizes": (
        b"RIFF"
        + struct.pack("<I", 40)
        + b"WEBPVP8X"
        + struct.pack("<I10s", 10, bytes(10))
        + picture(9, 9, kind="WEBP")[12:26],
        "cut off|different sizes",
    ),
    "GIF with a larger frame": (
        changed("GIF", lambda file: file.__setitem__(slice(6, 10), bytes((1, 0, 1, 0)))),
        "different",
    ),
    "JPEG of no frame": (b"\xff\xd8\xff\xda\0\x02\xff\xd9", "no pixels"),
    "JPEG of two frames": (b"\xff\xd8" + frame_header(9, 9) + frame_header(999, 999), "not supported"),
    "lossless JPEG": (b"\xff\xd8" + frame_header(9, 9, 0xC3), "not supported"),
    "JPEG of zeros": (b"\xff\xd8\xff" + bytes(99), "not those of a JPEG"),
    "JPEG of fill bytes": (b"\xff\xd8" + b"\xff" * 99, "cut off"),
    "JPEG of many scans": (
        b"\xff\xd8" + frame_header(9, 9) + b"\xff\xda\0\2\xff\0\1\xff\xd7" * 101 + b"\xff\xd9",
        "more than 100 scans",
    ),
    "JPEG with an end that is skipped": (
        b"\xff\xd8" + frame_header(9, 9) + b"\xff\xda\0\2\1\xff\1\xff\xd9",
        "not those",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_by_files_are_refused_in_one_line(attack: str) -> None:
    file, said = ATTACKS[attack]
    with pytest.raises(BadImage, match=said) as refusal:
        image_size(file, MOST)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 120


@pytest.mark.parametrize("progressive", [True, False])
def test_a_jpeg_may_have_what_cameras_append(*, progressive: bool) -> None:
    photo = picture(40, 30, kind="JPEG", progressive=progressive, comment=b"\xff\xd9")
    for more in (b"MotionPhoto_Data", b"\xff\xda" * 200, picture(9, 9, kind="JPEG")):
        assert image_size(photo + more, MOST) == (40, 30)


def test_any_bytes_are_read_or_refused() -> None:
    for kind in KINDS:
        file = picture(40, 30, kind=kind)
        for at in range(len(file)):
            for value in (0, 1, 0x7F, 0xFF):
                try:
                    width, height = image_size(file[:at] + bytes([value]) + file[at + 1 :], MOST)
                except BadImage:
                    continue
                assert 0 < width * height <= MOST
