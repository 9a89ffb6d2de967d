"""Token ids to text, one token at a time: no incomplete characters; the joined pieces are the text decoded whole.

Byte-level vocabularies (GPT-2's alphabet: Llama 3, Qwen, SmolLM, …) are decoded here: a token is bytes, and an
incremental UTF-8 decoder holds back incomplete characters, in constant time per token. All other vocabularies use
`tokenizers.DecodeStream`, primed with the end of the prompt, because the leading space of a SentencePiece token depends
on the tokens before it.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

import tokenizers
from tokenizers.decoders import ByteLevel, DecodeStream

from text_generation_router.request import TokenId

CONTEXT_TOKENS = 5
"""Prompt tokens before the first new token that a SentencePiece decoder reads; TGI's number."""

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """The text of one request. Special tokens must not be fed: they are no text."""

    def step(self, token_id: TokenId) -> str:
        """Return the text that this token completes; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """End the stream; return the text that was held back, with U+FFFD for an incomplete character."""
        ...


class DetokenizerFactory:
    """Creates the detokenizers of a tokenizer."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_bytes = byte_level_vocabulary(tokenizer) if isinstance(tokenizer.decoder, ByteLevel) else None

    def create(self, prompt: Sequence[TokenId]) -> Detokenizer:
        """Return a detokenizer for the tokens after `prompt`."""
        if self._token_bytes is not None:
            return ByteLevelDetokenizer(self._token_bytes)
        return StreamDetokenizer(self._tokenizer, prompt[-CONTEXT_TOKENS:])

    def token_bytes(self, token_id: TokenId) -> bytes:
        """Return the bytes of one token; if the vocabulary is not byte-level, the bytes of its text."""
        if self._token_bytes is None:
            return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
        return self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""


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
            else:
                return text
        return self._advance(hold_incomplete=True)

    def flush(self) -> str:
        return self._advance(hold_incomplete=False)

    def _advance(self, *, hold_incomplete: bool) -> str:
        """Decode everything again: exact for any decoder, but slower."""
        before = self._tokenizer.decode(self._context, skip_special_tokens=True)
        text = self._tokenizer.decode(self._context + self._ids, skip_special_tokens=True)[len(before) + self._given :]
        if hold_incomplete and text.endswith("\ufffd"):
            return ""
        self._given += len(text)
        return text


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
