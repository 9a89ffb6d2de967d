"""Tensor parallelism on a CPU as it is installed for CPUs: torch comes there without Triton."""

from __future__ import annotations

import os
from pathlib import Path

import aiohttp
import pytest
from byte_tokenizer import write_tokenizer
from stack import generate, running
from tiny_transformers import SHAPE, random_model, save
from transformers import LlamaConfig

pytestmark = pytest.mark.system


@pytest.mark.full
async def test_two_ranks_give_the_text_of_one_without_triton(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    model = Path(save(random_model(LlamaConfig(**SHAPE | {"vocab_size": 264})), tmp_path / "model"))
    write_tokenizer(model)
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "triton.py").write_text("raise ModuleNotFoundError(\"No module named 'triton'\", name='triton')")
    path = os.pathsep.join([str(hidden), os.environ.get("PYTHONPATH", "")])
    texts = []
    for ranks in "21":
        flags = ("--num-shard", ranks, "--device", "cpu", "--dtype", "float32")
        with running(model, *flags, engine="torch", environ={"PYTHONPATH": path}) as stack:
            texts.append(await generate(session, stack.url))
    assert texts[0] == texts[1]
