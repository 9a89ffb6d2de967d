"""FlashInfer's kernels, compiled in another process."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import triton

from text_generation_shard.engines.torch.kernels.flashinfer_chunks import FlashInferChunks
from text_generation_shard.engines.torch.kernels.flashinfer_compiler import FlashInferCompiler


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashInfer needs a GPU")
def test_kernels_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    device, dtypes = torch.device("cuda"), (torch.bfloat16, torch.bfloat16)
    shapes = [FlashInferChunks(32, 8, 128, {None: 0, 40: 1}, dtypes, scale=0.1).shape]
    assert not FlashInferCompiler(shapes, device, compiles=False).is_done
    before = {*threading.enumerate()}
    compiler = FlashInferCompiler(shapes, device)
    for thread in {*threading.enumerate()} - before:
        thread.join()
    assert compiler.is_done
    assert FlashInferCompiler(shapes, device, compiles=False).is_done
