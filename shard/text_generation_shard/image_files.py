"""Decodes the files of images in child processes: confined, with limited memory and time, killed and replaced when they fail.

A decoder is native code that reads untrusted input. In the shard's own process it could end the engine, or hold a thread for ever.
"""

import json
import os
import signal
import subprocess
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from io import BufferedRWPair, BytesIO
from struct import Struct
from typing import Any

from text_generation_common.exif import orientation
from text_generation_common.sandbox.process import start_process
from text_generation_common.sandbox.worker import HEADER, FrameKind

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_PIXELS = 1 << 26
"""Most pixels of an image."""
CPU_S = 10.0
"""CPU time for an image. The slowest that the router lets pass take 3 s."""
WALL_S = 60.0
"""Time for an image on a busy machine."""
MEMORY_BYTES = 1 << 30
"""Heap of a child process. The images that the router lets pass take half of it."""
SIZE = Struct(">II")
"""Width and height, before the pixels."""
MAX_ANSWER = SIZE.size + 3 * MAX_PIXELS


def decoder(_: dict[str, Any]) -> Callable[[], Callable[[bytes], bytes]]:
    """Return a function that returns the job: from a file to SIZE and three bytes for each pixel of the upright image."""
    os.environ["PILLOW_BLOCKS_MAX"] = "2"  # memory is used again: the kernel's clearing of it took half of the time
    from PIL import Image, UnidentifiedImageError

    warnings.simplefilter("ignore")
    Image.init()  # imports the formats
    for name in ("copy", "PIL.ImageColor"):  # imported when they are needed, which a confined process cannot
        import_module(name)
    turns = (None, *map(Image.Transpose, (0, 3, 1, 5, 4, 6, 2)))  # by orientation, from 1 on

    def decode(data: bytes) -> bytes:
        try:
            image = Image.open(BytesIO(data), formats=FORMATS)
        except UnidentifiedImageError:
            raise ValueError("it is no PNG, JPEG, WebP or GIF") from None
        if (pixels := image.width * image.height) > MAX_PIXELS:
            raise ValueError(f"it has {pixels} pixels, more than {MAX_PIXELS}")
        image.load()
        # The router counts the tokens by the size in the header and the same orientation.
        turn = turns[orientation(image.info.get("exif", b"")) - 1]
        colors = image if image.mode == "RGB" else image.convert("RGB")  # which would copy it
        upright = colors if turn is None else colors.transpose(turn)
        return SIZE.pack(*upright.size) + upright.tobytes()

    return lambda: decode


class ImageFiles:
    """Decodes files, one at a time, in a child process that starts with the first."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        """`warn` is called with the measures of confinement that the kernel refuses, if it refuses any."""
        self._warn = warn
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], int | None] = lambda: None

    def decode(self, data: bytes) -> tuple[tuple[int, int], bytes]:
        """Return width and height, and the pixels. Raises ValueError: the rest of a sentence about the image."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._start()
        body = self._ask(data)
        return SIZE.unpack_from(body), body[SIZE.size :]

    def close(self) -> int:
        """Kill the child process; return its exit code."""
        self._process = None
        return self._end() or 0

    def _start(self) -> None:
        self._process, connection = start_process("text_generation_shard.image_files:decoder")
        with connection:
            self._channel = connection.makefile("rwb")
        self._end = weakref.finalize(self, _end, self._process, self._channel)
        limits = {"niceness": 0, "memory_bytes": MEMORY_BYTES, "cpu_s": CPU_S, "max_output": MAX_ANSWER}
        if refused := self._ask(json.dumps({"config": {}, **limits}).encode()):
            self._warn(refused.decode())

    def _ask(self, payload: bytes) -> bytes:
        assert self._process is not None
        timer = threading.Timer(WALL_S, self._process.kill)
        timer.start()
        try:
            self._channel.write(HEADER.pack(len(payload), FrameKind.JOB))
            self._channel.write(payload)
            self._channel.flush()
            size, kind = HEADER.unpack(self._read(HEADER.size))
            body = self._read(size)
        except OSError:
            late = self.close() == -signal.SIGPROF
            raise ValueError("it takes too long to decode" if late else "its decoder died") from None
        finally:
            timer.cancel()
        if kind == FrameKind.OUT_OF_MEMORY:  # it is about to end
            self.close()
            raise ValueError("it needs more memory than a decoder may have")
        if kind == FrameKind.FAILED:
            raise ValueError(body.decode(errors="replace"))
        return body

    def _read(self, size: int) -> bytes:
        data = self._channel.read(min(size, MAX_ANSWER))
        if len(data) < size:  # it died, or broke the protocol
            raise ConnectionError
        return data


def _end(process: subprocess.Popen[bytes], channel: BufferedRWPair) -> int:
    process.kill()
    with suppress(OSError):  # for what was not sent
        channel.close()
    return process.wait()
