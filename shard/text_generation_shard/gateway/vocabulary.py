"""The model's tokenizer, for one purpose: to find stop strings in what a sequence spells.

A shard sees no text, with this exception: a gateway written for TensorRT-LLM sends stop strings as strings, and expects
the server to know its tokenizer. Nothing but tokens leaves the shard all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

CONTEXT_TOKENS = 5
"""Prompt tokens before the first new one that decoders look at: the first new word's leading space depends on them."""
INCOMPLETE = "\ufffd"
"""What bytes are decoded to that are not a whole character yet."""


class NoVocabulary(Exception):
    """There is no tokenizer, or it cannot be read; one line that says so."""


class Vocabulary:
    """A tokenizer.json. Safe to share: immutable once it is loaded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path | None) -> Vocabulary:
        """Read it from the model's folder. Takes up to a second. Raises NoVocabulary."""
        if folder is None or not (folder / "tokenizer.json").is_file():
            raise NoVocabulary("the model folder has no tokenizer.json")
        from tokenizers import Tokenizer

        try:
            return cls(Tokenizer.from_file(str(folder / "tokenizer.json")))
        except Exception as error:  # the library raises nothing more precise
            raise NoVocabulary(f"the model folder's tokenizer.json cannot be read: {error}") from error

    def text_after(self, prompt: Sequence[int]) -> Spelling:
        """What the tokens that follow `prompt` spell."""
        return Spelling(self._tokenizer, prompt[-CONTEXT_TOKENS:])


class Spelling:
    """One sequence's new text, a token at a time. Control tokens are spelled out: they can be stop strings, too."""

    __slots__ = ("_context", "_ids", "_length", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._context = list(context)
        self._ids: list[int] = []
        self._length = 0
        """Characters given out."""
        self._stream: DecodeStream | None = DecodeStream(ids=self._context, skip_special_tokens=False)

    def step(self, token_id: int) -> str:
        """The text this token completes; empty while a character is incomplete."""
        self._ids.append(token_id)
        text = None if self._stream is None else self._streamed(self._stream, token_id)
        if text is None:
            text = self._decoded()
        self._length += len(text)
        return text

    def _streamed(self, stream: DecodeStream, token_id: int) -> str | None:
        """None: the library's incremental decoder gave up, as it does where a token changes the text before it."""
        try:
            return stream.step(self._tokenizer, token_id) or ""
        except Exception:  # noqa: BLE001 - it raises a bare Exception
            self._stream = None
            return None

    def _decoded(self) -> str:
        """The same by decoding everything again: exact for any decoder, if slower."""
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        whole = self._tokenizer.decode(self._context + self._ids, skip_special_tokens=False)
        return "" if whole.endswith(INCOMPLETE) else whole[len(before) + self._length :]
