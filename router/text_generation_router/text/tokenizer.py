"""The model's tokenizer: encodes texts, decodes token ids, and detokenizes new tokens one at a time.

Long texts are encoded on threads, so that they do not block the event loop. The library's `encode_batch` releases the
GIL, its `encode` does not.

A detokenizer returns no incomplete characters, and its pieces join to the text decoded whole. Byte-level vocabularies
(GPT-2's alphabet: Llama 3, Qwen, SmolLM, …) are decoded here: a token is bytes, and an incremental UTF-8 decoder holds
back incomplete characters, in constant time per token. All other vocabularies use `tokenizers.DecodeStream`, primed with
the end of the prompt, because the leading space of a SentencePiece token depends on the tokens before it.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import tokenizers
from tokenizers.decoders import ByteLevel, DecodeStream

from text_generation_proto.panics import as_exception, without_panics
from text_generation_router.errors import InvalidRequest, Overloaded, ServingError
from text_generation_router.request import TokenId

INLINE_CHARACTERS = 1024
"""Texts up to this length are encoded on the event loop, in less than half a millisecond, unless `may_backtrack`."""
SLOW_INLINE_S = 0.02
"""CPU time of a text on the event loop after which no other is encoded there."""
INLINE_TOKENS = 512
"""Up to so many tokens are decoded on the event loop."""
CHARACTERS_PER_TOKEN = 4
"""Length of text that one token counts as, to estimate the time of a decode."""
LONG_CHARACTERS = 1 << 17
"""Longer texts, tenths of a second of work each, run one at a time on a thread of their own."""
MAX_LONG = 16
"""Limit of long texts that run or wait; the next one is refused."""
CONTEXT_TOKENS = 5
"""Prompt tokens before the first new token that a SentencePiece decoder reads; TGI's number."""

_CHARACTER_SET = re.compile(r"\[(?:\\.|[^\]\\])+\]")
_REPEATED_GROUP = re.compile(r"\)[*+{]|\\[1-9k]")
_UTF8 = codecs.getincrementaldecoder("utf-8")

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


class Detokenizer(Protocol):
    """The text of one request. Special tokens must not be fed: they are no text."""

    def step(self, token_id: TokenId) -> str:
        """Return the text that this token completes; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """End the stream; return the text that was held back, with U+FFFD for an incomplete character."""
        ...


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
        self._inline_characters = 0 if may_backtrack(tokenizer) else INLINE_CHARACTERS
        self._bytes = byte_level_vocabulary(tokenizer) if isinstance(tokenizer.decoder, ByteLevel) else None
        """Bytes of each token; None if the vocabulary is not byte-level."""
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
            return cls(without_panics(tokenizers.Tokenizer.from_file)(str(path)), workers)
        except Exception as error:
            raise TokenizerError(f"{path} cannot be read: {error}") from error

    async def encode_ids(self, text: str, *, add_special_tokens: bool) -> list[TokenId]:
        """Return the token ids of `text`. Raises Overloaded."""

        @without_panics
        def encode() -> list[TokenId]:
            [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return encoding.ids

        if len(text) <= self._inline_characters:
            started = time.thread_time()
            try:
                return encode()
            finally:
                if time.thread_time() - started > SLOW_INLINE_S:
                    self._inline_characters = 0
        return await self._on_thread(len(text), encode)

    async def encode(self, text: str, *, add_special_tokens: bool) -> Encoding:
        """Return the token ids of `text` and the characters of each. Raises Overloaded."""

        @without_panics
        def encode() -> Encoding:
            [encoding] = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
            return Encoding(encoding.ids, encoding.offsets)

        return await self._on_thread(len(text), encode)

    @without_panics
    def detokenizer(self, prompt: Sequence[TokenId]) -> Detokenizer:
        """Return a detokenizer for the tokens after `prompt`."""
        if self._bytes is not None:
            return ByteLevelDetokenizer(self._bytes)
        return StreamDetokenizer(self._tokenizer, prompt[-CONTEXT_TOKENS:])

    @without_panics
    def token_text(self, token_id: TokenId) -> str:
        """Return the text of one token alone, special or not; for lists of alternatives and prompt tokens."""
        text = self._token_texts.get(token_id)
        if text is None:  # cached: answers with alternatives list thousands of tokens
            text = self.special_texts.get(token_id)
            if text is None:
                text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            self._token_texts[token_id] = text
        return text

    @without_panics
    def token_bytes(self, token_id: TokenId) -> bytes:
        """Return the bytes of one token, which may be part of a character; none for an id outside the vocabulary."""
        if token_id in self.special_texts:
            return self.special_texts[token_id].encode()
        if self._bytes is None:
            return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    async def decode(self, ids: Sequence[TokenId]) -> str:
        """Return the text of `ids`, special tokens included. Raises Overloaded."""

        @without_panics
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


class ByteLevelDetokenizer:
    """The detokenizer for vocabularies of byte strings. Ids outside the vocabulary have no text."""

    __slots__ = ("_decode", "_token_bytes")

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        # `replace` substitutes maximal ill-formed subsequences, as Rust's from_utf8_lossy in `tokenizers` does.
        self._decode = _UTF8(errors="replace").decode

    def step(self, token_id: TokenId) -> str:
        try:
            return self._decode(self._token_bytes[token_id])
        except IndexError:
            return ""

    def flush(self) -> str:
        return self._decode(b"", True)  # noqa: FBT003 - the codec's own signature


class StreamDetokenizer:
    """The detokenizer for all other vocabularies, over the library's incremental decoder."""

    __slots__ = ("_context", "_given", "_ids", "_stream", "_tokenizer")

    def __init__(self, tokenizer: tokenizers.Tokenizer, context: Sequence[TokenId]) -> None:
        self._tokenizer = tokenizer
        self._context = list(context)
        self._ids: list[TokenId] = []
        self._given = 0
        """Characters returned so far."""
        self._stream: DecodeStream | None = DecodeStream(ids=self._context, skip_special_tokens=True)

    def step(self, token_id: TokenId) -> str:
        self._ids.append(token_id)
        if self._stream is not None:
            try:
                text = self._stream.step(self._tokenizer, token_id) or ""
                self._given += len(text)
            except Exception:  # noqa: BLE001 - the library raises a bare Exception when a decoder rewrites its prefix
                self._stream = None
            except BaseException as error:  # noqa: BLE001 - raised as an ordinary error
                raise as_exception(error) from None
            else:
                return text
        return self._advance(hold_incomplete=True)

    def flush(self) -> str:
        return self._advance(hold_incomplete=False)

    @without_panics
    def _advance(self, *, hold_incomplete: bool) -> str:
        """Decode everything again: exact for any decoder, but slower."""
        before = self._tokenizer.decode(self._context, skip_special_tokens=True)
        text = self._tokenizer.decode(self._context + self._ids, skip_special_tokens=True)[len(before) + self._given :]
        if hold_incomplete and text.endswith("\ufffd"):
            return ""
        self._given += len(text)
        return text


def may_backtrack(tokenizer: tokenizers.Tokenizer) -> bool:
    """Return True if a short text may take long: a regular expression of the tokenizer repeats a group or refers back.

    Its library gives up after 0.2 s, with a panic. The expressions of the usual models repeat single characters only.
    """
    parts = (tokenizer.normalizer, tokenizer.pre_tokenizer)
    expressions = [
        found for part in parts if part is not None for found in _expressions(json.loads(part.__getstate__()))
    ]
    return any(_REPEATED_GROUP.search(_CHARACTER_SET.sub("x", expression)) for expression in expressions)


def _expressions(part: object) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(expression := part.get("Regex"), str):
            yield expression
        part = list(part.values())
    if isinstance(part, list):
        for inner in part:
            yield from _expressions(inner)


def byte_level_vocabulary(tokenizer: tokenizers.Tokenizer) -> list[bytes]:
    """Return the bytes of every token id, as the ByteLevel decoder maps them.

    A token in the byte alphabet stands for those bytes; any other (an added token with a space in it) for its UTF-8.
    """
    alphabet = byte_alphabet()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        try:
            table[token_id] = bytes([alphabet[character] for character in token])
        except KeyError:
            table[token_id] = token.encode()
    return table


def byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of GPT-2's alphabet (openai/gpt-2, encoder.py, bytes_to_unicode)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet
