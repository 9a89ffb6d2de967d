"""The model's tokenizer, on threads of its own, so that the event loop goes on serving.

Of the library's calls `encode_batch` releases the GIL and `encode` does not: a long text goes through the former.
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
"""Texts up to this long are encoded where they are: that takes less than half a millisecond."""
INLINE_TOKENS = 512
"""As many are decoded where they are."""
CHARACTERS_PER_TOKEN = 4
"""As how long a text so many tokens count, when it is about what takes long."""
LONG_CHARACTERS = 1 << 17
"""Texts longer than this, tenths of a second of work each, queue in a lane of their own, one at a time."""
LONG_WAITING = 16
"""As many of them may be in that lane; the next one is refused."""


T = TypeVar("T")


class TokenizerError(Exception):
    """There is no tokenizer to load, or it is broken: one clear line for the operator."""


@contextmanager
def tokenizer_errors() -> Iterator[None]:
    """What a tokenizer says of a text is the client's to know. Raises InvalidRequest in place of its own."""
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
    """Encodes off the loop, makes detokenizers. Safe to share: the library's tokenizer is immutable once loaded."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, workers: int) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # Special tokens written in a text are recognised as such, as in TGI: prompts come through chat templates.
        tokenizer.encode_special_tokens = False
        self._tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="tokenizer")
        self._long_lane = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-long")
        self._long_waiting = 0
        self._detokenizers = DetokenizerFactory(tokenizer)
        self.special_texts: dict[TokenId, str] = {
            token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        """Text of each special token; none of it is ever part of a generated text."""
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
        """Token ids of `text`. Raises Overloaded."""

        def encode() -> list[TokenId]:
            [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return encoding.ids

        if len(text) <= INLINE_CHARACTERS:
            return encode()
        return await self._off_the_loop(len(text), encode)

    async def encode(self, text: str, *, add_special_tokens: bool) -> Encoding:
        """Token ids of `text`, and which characters each stands for. Raises Overloaded."""

        def encode() -> Encoding:
            [encoding] = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
            return Encoding(encoding.ids, encoding.offsets)

        return await self._off_the_loop(len(text), encode)

    def detokenizer(self, prompt: Sequence[TokenId]) -> Detokenizer:
        """For the new tokens that follow `prompt`."""
        return self._detokenizers.create(prompt)

    def token_text(self, token_id: TokenId) -> str:
        """One token on its own, special or not; for lists of alternatives and prompt tokens."""
        text = self._token_texts.get(token_id)
        if text is None:  # at most once a token of the vocabulary: answers with alternatives name thousands
            text = self.special_texts.get(token_id)
            if text is None:
                text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            self._token_texts[token_id] = text
        return text

    def token_bytes(self, token_id: TokenId) -> bytes:
        """The bytes one token stands for, be they whole characters or not."""
        if token_id in self.special_texts:
            return self.special_texts[token_id].encode()
        return self._detokenizers.token_bytes(token_id)

    async def decode(self, ids: Sequence[TokenId]) -> str:
        """The text of `ids`, special tokens and all. Raises Overloaded."""

        def decode() -> str:
            [text] = self._tokenizer.decode_batch([list(ids)], skip_special_tokens=False)
            return text

        if len(ids) <= INLINE_TOKENS:
            return decode()
        return await self._off_the_loop(len(ids) * CHARACTERS_PER_TOKEN, decode)

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._long_lane.shutdown(wait=False, cancel_futures=True)

    async def _off_the_loop(self, characters: int, work: Callable[[], T]) -> T:
        """Run `work` on a thread: the lane for long texts, so that nobody's short one waits behind them."""
        loop = asyncio.get_running_loop()
        if characters <= LONG_CHARACTERS:
            return await loop.run_in_executor(self._pool, work)
        if self._long_waiting >= LONG_WAITING:
            raise Overloaded
        self._long_waiting += 1
        try:
            return await loop.run_in_executor(self._long_lane, work)
        finally:
            self._long_waiting -= 1
