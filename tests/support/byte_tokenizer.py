"""A tokenizer.json that has a token for each byte, a few longer ones, and control tokens; made in a moment."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel

END = 0
"""The id of its only end token."""


def write_tokenizer(folder: Path) -> Tokenizer:
    """Write it to `folder`: ids 0 and 1 are control tokens, 2 … 257 the bytes, then words of JSON."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [('"', ":"), ("t", "r"), ("tr", "u"), ("tru", "e"), ('"', "}"), ("a", "b")]
    names = ["<|end|>", "<|other|>", *characters, *(left + right for left, right in words)]
    tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, words))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|other|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer
