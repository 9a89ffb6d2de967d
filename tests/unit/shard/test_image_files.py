"""Decoders of images: what they return, and that a hang, a crash or too much memory costs a child process and one image."""

from __future__ import annotations

import io
import os
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator

import psutil
import pytest
from pictures import picture
from PIL import Image, ImageOps

from text_generation_shard import image_files
from text_generation_shard.image_files import ImageFiles

SIZE = 60, 40


@pytest.fixture
def files() -> Iterator[ImageFiles]:
    made = ImageFiles(lambda refused: pytest.fail(refused))
    yield made
    made.close()


def process(files: ImageFiles) -> psutil.Process:
    assert files._process is not None
    return psutil.Process(files._process.pid)


def check(files: ImageFiles) -> None:
    assert files.decode(picture(*SIZE)) == (SIZE, Image.new("RGB", SIZE, "red").tobytes())


def refusal(files: ImageFiles, data: bytes) -> str:
    with pytest.raises(ValueError, match=" ") as error:
        files.decode(data)
    check(files)
    assert "\n" not in str(error.value)
    return str(error.value)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, data: bytes, *chunks: bytes) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def many_scans(side: int, count: int) -> bytes:
    """Return a progressive JPEG that repeats its last scan: each costs a decoder the time of all pixels."""
    file = io.BytesIO()
    Image.new("RGB", (side, side), "red").save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * count + b"\xff\xd9"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_the_pixels_are_those_of_the_library(files: ImageFiles, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for mode in ("RGB", "L") if kind == "JPEG" else ("RGB", "RGBA", "L", "P", "1"):
        file = io.BytesIO()
        options = {} if kind == "GIF" else {"exif": exif}
        Image.effect_noise(SIZE, 50).convert(mode).save(file, kind, **options)
        stored = Image.open(file)
        expected = ImageOps.exif_transpose(stored).convert("RGB")
        assert files.decode(file.getvalue()) == (expected.size, expected.tobytes())


def test_a_bad_file_costs_no_process(files: ImageFiles) -> None:
    check(files)
    before = process(files)
    svg = b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>"
    for data in (b"", svg, b"%PDF-1.7", picture(*SIZE, kind="BMP"), picture(*SIZE, kind="TIFF"), picture(*SIZE)[:30]):
        assert refusal(files, data) == "it is no PNG, JPEG, WebP or GIF"
    assert "truncated" in refusal(files, picture(*SIZE)[:70])
    assert "pixels, more than" in refusal(files, png(10_000, 10_000, b""))
    for kind in (b"zTXt", b"iCCP"):
        assert "too large" in refusal(
            files, png(9, 9, bytes(252), chunk(kind, b"a\0\0" + zlib.compress(bytes(1 << 24))))
        )
    assert process(files) == before


def test_an_image_that_takes_too_long_costs_its_process(files: ImageFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files, "CPU_S", 0.1)
    check(files)
    before = process(files)
    assert refusal(files, many_scans(3000, 99)) == "it takes too long to decode"
    assert not before.is_running()


def test_an_image_that_takes_too_much_memory_costs_its_process(
    files: ImageFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_files, "MEMORY_BYTES", 60 << 20)
    check(files)
    before = process(files)
    assert refusal(files, picture(4000, 4000)) == "it needs more memory than a decoder may have"
    before.wait(10)


def test_a_decoder_that_hangs_is_killed(files: ImageFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    check(files)
    before = process(files)
    before.suspend()
    with monkeypatch.context() as patch:
        patch.setattr(image_files, "WALL_S", 0.1)
        with pytest.raises(ValueError, match="its decoder died"):
            files.decode(picture(*SIZE))
    assert not before.is_running()
    check(files)


def test_a_decoder_that_was_killed_is_replaced(files: ImageFiles) -> None:
    check(files)
    before = process(files)
    os.kill(before.pid, signal.SIGKILL)
    before.wait(10)
    check(files)


def test_a_decoder_that_was_taken_over_does_not_fill_the_memory(
    files: ImageFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(files)
    before = process(files)
    with monkeypatch.context() as patch:
        patch.setattr(image_files, "MAX_ANSWER", 100)
        with pytest.raises(ValueError, match="its decoder died"):
            files.decode(picture(*SIZE))
    assert not before.is_running()
    check(files)


def test_no_decoder_is_left() -> None:
    files = ImageFiles(lambda refused: None)
    check(files)
    before = process(files)
    del files
    assert not before.is_running()


def test_a_decoder_imports_neither_torch_nor_numpy() -> None:
    program = "import sys, text_generation_shard.image_files as files; files.decoder({}); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout.decode().split()
    assert "PIL.WebPImagePlugin" in loaded
    assert not {"torch", "numpy", "structlog", "pydantic", "grpc", "asyncio"} & set(loaded)
