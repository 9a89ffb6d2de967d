"""Fixtures with prompts and the demo model's reference answers by transformers, computed once per session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

NEW_TOKENS = 64
PROMPT_LENGTHS = [
    *(1, 2, 3, 5, 8, 13, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65),
    *(100, 127, 128, 200, 333, 512, 1000, 1500),
]
BATCHES = (slice(0, 16), slice(16, 21), slice(21, 24))
"""Prompts of similar length; the reference is computed in these batches."""


@pytest.fixture(scope="session")
def prompts(demo_model: Path) -> list[tuple[int, ...]]:
    """Natural text of 24 lengths, from different positions of the license."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(demo_model / "tokenizer.json")).encode(text).ids
    starts = [(37 * i) % (len(ids) - length) for i, length in enumerate(PROMPT_LENGTHS)]
    return [tuple(ids[start : start + length]) for start, length in zip(starts, PROMPT_LENGTHS, strict=True)]


@pytest.fixture(scope="session")
def reference(demo_model: Path, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """Greedy tokens of transformers' `generate` in float32, not stopped by EOS."""
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    replies: list[list[int]] = []
    for batch in BATCHES:
        some = prompts[batch]
        width = max(len(prompt) for prompt in some)
        ids = torch.tensor([(0,) * (width - len(prompt)) + prompt for prompt in some])
        mask = torch.tensor([(0,) * (width - len(prompt)) + (1,) * len(prompt) for prompt in some])
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0)
        replies += [row[width:] for row in out.tolist()]
    return replies
