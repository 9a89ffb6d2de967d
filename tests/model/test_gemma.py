"""Gemma 3 270M over HTTP, the second real model: windows in most layers, two rotations, a vocabulary of 262,144 tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
import torch
from stack import running
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.model, pytest.mark.full]

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".cache" / "models" / "gemma3-270m"
NEW_TOKENS = 24
WORDS = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 100, 150, 250, 400, 600)


@pytest.mark.skipif(not MODEL.is_dir(), reason="no Gemma: make model MODEL=gemma3-270m")
async def test_greedy_texts_are_those_of_transformers() -> None:
    """Each token is the most probable one after those before it, of texts on both sides of the window of 512 tokens."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    words = (ROOT / "LICENSE").read_text(encoding="utf-8").split(" ")
    texts = [" ".join(words[37 * number :][:count]) for number, count in enumerate(WORDS)]
    with running(MODEL, "--dtype", "float32", engine="torch") as stack:
        async with aiohttp.ClientSession(stack.url) as session:

            async def generate(text: str) -> list[int]:
                parameters = {"max_new_tokens": NEW_TOKENS, "details": True}
                async with session.post("/generate", json={"inputs": text, "parameters": parameters}) as response:
                    answer = await response.json()
                    tokens = [token["id"] for token in answer["details"]["tokens"]]
                    assert answer["generated_text"] == tokenizer.decode(tokens)
                    return tokens

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(generate(text)) for text in texts]
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    for text, task in zip(texts, tasks, strict=True):
        tokens = task.result()
        ids = [*tokenizer.encode(text).ids, *tokens]
        with torch.inference_mode():
            logits = model(torch.tensor([ids]), logits_to_keep=len(tokens) + 1).logits[0, :-1]
        assert logits.argmax(-1).tolist() == tokens
        assert len(tokens) == NEW_TOKENS or tokens[-1] == 1
