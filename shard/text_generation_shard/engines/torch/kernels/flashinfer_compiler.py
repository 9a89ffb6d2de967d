"""Compiles FlashInfer's kernels in another process, this module as a program, which takes more than a minute.

Meanwhile the chunks of prompts are computed by our own kernel. The results stay in FlashInfer's cache on disk.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from threading import Thread

import torch

from text_generation_common.lifeline import follow_parent
from text_generation_common.log import log
from text_generation_common.one_line import one_line
from text_generation_shard.engines.torch.kernels.compiled import CompiledMarker
from text_generation_shard.engines.torch.kernels.flashinfer_chunks import ChunkShape, FlashInferChunks


class FlashInferCompiler:
    """The kernels of some shapes. They are compiled at once, unless they were before."""

    def __init__(self, shapes: Sequence[ChunkShape], device: torch.device, *, compiles: bool = True) -> None:
        self._shapes = json.dumps(shapes)
        self._marker = CompiledMarker(device, self._shapes)
        self.is_done = self._marker.exists()
        if compiles and not self.is_done:
            Thread(target=self._compile, name="compiling FlashInfer", daemon=True).start()

    def _compile(self) -> None:
        started, last = time.monotonic(), ""
        command = [sys.executable, "-m", __name__]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace"
        ) as helper:
            assert helper.stdin is not None
            assert helper.stdout is not None
            helper.stdin.write(f"{self._shapes}\n")
            helper.stdin.flush()
            for line in helper.stdout:
                last = line.strip() or last
        if helper.returncode:
            log.warning("FlashInfer's kernels were not compiled: prompts are computed slower", error=one_line(last))
            return
        self._marker.create()
        log.info("FlashInfer's kernels compiled", seconds=round(time.monotonic() - started, 1))
        self.is_done = True


def main() -> None:
    """Compile the kernels of the shapes on stdin. The server starts meanwhile, and goes first."""
    os.nice(19)
    shapes = json.loads(sys.stdin.readline())
    follow_parent(sys.stdin.fileno())
    for shape in shapes:
        FlashInferChunks.compile(ChunkShape(*shape))


if __name__ == "__main__":
    main()
