"""The model's tokenizer, on its own threads, so that it does not block the event loop.

The library's `encode_batch` releases the GIL, its `encode` does not: long texts use the former.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import tokenizers

from text_generation_router.errors import InvalidRequest, Overloaded, ServingError
from text_generation_router.request import TokenId
from text_generation_router.text.detokenizer import Detokenizer, DetokenizerFactory

INLINE_CHARACTERS = 1024
"""Texts up to this length are encoded on the event loop, in less than half a millisecond."""
INLINE_TOKENS = 512
"""Up to so many tokens are decoded on the event loop."""
CHARACTERS_PER_TOKEN = 4
"""Length of text that one token counts as, to estimate the time of a decode."""
LONG_CHARACTERS = 1 << 17
"""Longer texts, tenths of a second of work each, run one at a time on a thread of their own."""
MAX_LONG = 16
"""Limit of long texts that run or wait; the next one is refused."""


T = TypeVar("T")


class TokenizerError(Exception):
    """The tokenizer is missing or broken; one line for the operator."""


@contextmanager
def tokenizer_errors() -> Iterator[None]:
    """Raise the tokenizer's errors about a text as InvalidRequest."""
    try:
        yield
    except ServingError:
        raise
    except Exception as error:
        raise InvalidRequest(f"tokenizer error {error}") from error


@dataclass(frozen=True, slots=True)
class Encoding:
    """A text as tokens."""

    ids: list[TokenId]
    offsets: list[tuple[int, int]]
    """Half-open character intervals of the text; (0, 0) for tokens the tokenizer adds."""


class Tokenizer:
    """Encodes and decodes, and creates detokenizers. Safe to share: the library's tokenizer is immutable once loaded."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, workers: int) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # Special tokens in a text are recognised, as in TGI: chat templates write them into prompts.
        tokenizer.encode_special_tokens = False
        self._tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="tokenizer")
        self._long_pool = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-long")
        self._num_long = 0
        self._detokenizers = DetokenizerFactory(tokenizer)
        self.special_texts: dict[TokenId, str] = {
            token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        """Text of each special token; generated text never contains it."""
        self._token_texts: dict[TokenId, str] = {}

    @classmethod
    def load(cls, folder: Path, workers: int) -> Tokenizer:
        """Read `tokenizer.json` from `folder`. Raises TokenizerError."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{folder} has no tokenizer.json; a fast tokenizer is needed")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)), workers)
        except Exception as error:
            raise TokenizerError(f"{path} cannot be read: {error}") from error

    async def encode_ids(self, text: str, *, add_special_tokens: bool) -> list[TokenId]:
        """Return the token ids of `text`. Raises Overloaded."""

        def encode() -> list[TokenId]:
            [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return encoding.ids

        if len(text) <= INLINE_CHARACTERS:
            return encode()
        return await self._on_thread(len(text), encode)

    async def encode(self, text: str, *, add_special_tokens: bool) -> Encoding:
        """Return the token ids of `text` and the characters of each. Raises Overloaded."""

        def encode() -> Encoding:
            [encoding] = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
            return Encoding(encoding.ids, encoding.offsets)

        return await self._on_thread(len(text), encode)

    def detokenizer(self, prompt: Sequence[TokenId]) -> Detokenizer:
        """Return a detokenizer for the tokens after `prompt`."""
        return self._detokenizers.create(prompt)

    def token_text(self, token_id: TokenId) -> str:
        """Return the text of one token alone, special or not; for lists of alternatives and prompt tokens."""
        text = self._token_texts.get(token_id)
        if text is None:  # cached: answers with alternatives list thousands of tokens
            text = self.special_texts.get(token_id)
            if text is None:
                text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            self._token_texts[token_id] = text
        return text

    def token_bytes(self, token_id: TokenId) -> bytes:
        """Return the bytes of one token, which may be part of a character."""
        if token_id in self.special_texts:
            return self.special_texts[token_id].encode()
        return self._detokenizers.token_bytes(token_id)

    async def decode(self, ids: Sequence[TokenId]) -> str:
        """Return the text of `ids`, special tokens included. Raises Overloaded."""

        def decode() -> str:
            [text] = self._tokenizer.decode_batch([list(ids)], skip_special_tokens=False)
            return text

        if len(ids) <= INLINE_TOKENS:
            return decode()
        return await self._on_thread(len(ids) * CHARACTERS_PER_TOKEN, decode)

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._long_pool.shutdown(wait=False, cancel_futures=True)

    async def _on_thread(self, characters: int, work: Callable[[], T]) -> T:
        """Run `work` on a thread; long texts have their own, so that short ones do not wait for them."""
        loop = asyncio.get_running_loop()
        if characters <= LONG_CHARACTERS:
            return await loop.run_in_executor(self._pool, work)
        if self._num_long >= MAX_LONG:
            raise Overloaded
        self._num_long += 1
        try:
            return await loop.run_in_executor(self._long_pool, work)
        finally:
            self._num_long -= 1
