"""The model's tokenizer: encodes texts, decodes token ids, and detokenizes new tokens one at a time.

A detokenizer returns no incomplete characters, and its pieces join to the text decoded whole. Byte-level vocabularies
(GPT-2's alphabet: Llama 3, Qwen, SmolLM, …) are decoded here: a token is bytes, and an incremental UTF-8 decoder holds
back incomplete characters, in constant time per token. All other vocabularies use `tokenizers.DecodeStream`, primed with
the end of the prompt, because the leading space of a SentencePiece token depends on the tokens before it.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from encodings.utf_8 import IncrementalDecoder
from functools import cached_property
from pathlib import Path
from typing import Protocol

import tokenizers
from tokenizers.decoders import ByteLevel, DecodeStream
from tokenizers.models import BPE

from text_generation_common.exit_codes import CannotServe
from text_generation_common.model_files import MAX_TOKEN_IDS, MAX_TOKENIZER_BYTES, ModelFileError, find_file, read_file
from text_generation_common.panics import as_exception, without_panics
from text_generation_router.errors import InvalidRequest, ServingError
from text_generation_router.request import TokenId
from text_generation_router.text.cuts import Cuts, crossed_by

BACKTRACKING_SCALE = 1 / 8
"""Length of pieces, as a part of the usual one, of a tokenizer that may take long for a short text."""
CONTEXT_TOKENS = 5
"""Prompt tokens before the first new token that a SentencePiece decoder reads; TGI's number."""

_CHARACTER_SET = re.compile(r"\[(?:\\.|[^\]\\])+\]")
_REPEATED_GROUP = re.compile(r"\)[*+{]|\\[1-9k]")


class TokenizerError(CannotServe):
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
    ids: Sequence[TokenId]
    starts: Sequence[int]
    """The first character of each token; 0 for tokens the tokenizer adds."""
    stops: Sequence[int]
    """The character after each token; 0 for tokens the tokenizer adds."""


class Detokenizer(Protocol):
    """The text of one request. Special tokens must not be fed: they are not text."""

    def step(self, token_id: TokenId) -> str:
        """Return the text that this token completes; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """End the stream; return the text that was held back, with U+FFFD for an incomplete character."""
        ...


class Tokenizer:
    """Encodes and decodes, and creates detokenizers. Safe to share: the library's tokenizer is immutable once loaded."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # Special tokens in a text are recognised, as in TGI: chat templates write them into prompts.
        tokenizer.encode_special_tokens = False
        self._tokenizer = tokenizer
        self.may_backtrack = may_backtrack(tokenizer)
        """True if a short text may take long."""
        self._bytes = byte_level_vocabulary(tokenizer) if isinstance(tokenizer.decoder, ByteLevel) else None
        """Bytes of each token; None if the vocabulary is not byte-level."""
        vocabulary = tokenizer.get_vocab(with_added_tokens=True) if self._bytes is None else {}
        self.vocabulary = max(vocabulary.values(), default=-1) + 1 if self._bytes is None else len(self._bytes)
        """Token ids are below this."""
        self._crossed = crossed_by(vocabulary) if vocabulary and isinstance(tokenizer.model, BPE) else None
        self.special_texts: dict[TokenId, str] = {
            token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        """Text of each special token; generated text never contains it."""
        self.markers: dict[str, TokenId] = {
            token.content: token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }
        """Special tokens of llguidance by text: grammars must name them by id."""
        self._token_texts: dict[TokenId, str] = {}
        self._whole: dict[TokenId, str] = {}
        """Texts of generated tokens that are whole characters."""

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read `tokenizer.json` from `folder`. Raises TokenizerError."""
        path = folder / "tokenizer.json"
        try:
            data = read_file(find_file(folder, path.name), MAX_TOKENIZER_BYTES)
            return cls(without_panics(tokenizers.Tokenizer.from_buffer)(data))
        except (FileNotFoundError, NotADirectoryError):
            raise TokenizerError(f"{folder} has no tokenizer.json; a fast tokenizer is needed") from None
        except ModelFileError as error:
            raise TokenizerError(str(error)) from error
        except Exception as error:
            raise TokenizerError(f"{path} cannot be read: {error}") from error

    @without_panics
    def encode_ids(self, text: str, *, add_special_tokens: bool) -> list[TokenId]:
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    @without_panics
    def encode(self, text: str, *, add_special_tokens: bool) -> Encoding:
        """Return the token ids of `text` and the characters of each."""
        [encoding] = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        offsets = encoding.offsets
        return Encoding(encoding.ids, [start for start, _ in offsets], [stop for _, stop in offsets])

    @cached_property
    def cuts(self) -> Cuts:
        """The places at which long texts may be cut. The first use takes two tenths of a second."""
        scale = BACKTRACKING_SCALE if self.may_backtrack else 1
        return without_panics(Cuts)(self._tokenizer, self._crossed, scale=scale)

    @without_panics
    def encode_piece(self, text: str, start: int, stop: int, *, offsets: bool) -> list[array[int]]:
        """Return the token ids of a piece of a text; with `offsets` also the first character of each, and that after it."""
        begin = max(start - 1, 0)
        encode = self._tokenizer.encode_batch if offsets else self._tokenizer.encode_batch_fast
        before, piece = encode([text[begin:start], text[begin:stop]], add_special_tokens=False)
        new = slice(len(before.ids), None)
        columns = [array("I", piece.ids[new])]
        if offsets:
            columns += [array("I", [begin + ends[side] for ends in piece.offsets[new]]) for side in (0, 1)]
        return columns

    @without_panics
    def surrounding_tokens(self) -> tuple[list[TokenId], list[TokenId]]:
        """Return the tokens that the tokenizer puts before and after a text."""
        plain, whole = (self.encode_ids("a", add_special_tokens=special) for special in (False, True))
        at = next(at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
        return whole[:at], whole[at + len(plain) :]

    @without_panics
    def detokenizer(self, prompt: Sequence[TokenId]) -> Detokenizer:
        if self._bytes is not None:
            return ByteLevelDetokenizer(self._bytes, self._whole)
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

    @without_panics
    def decode(self, ids: Sequence[TokenId]) -> str:
        """Return the text of `ids`, special tokens included."""
        [text] = self._tokenizer.decode_batch([list(ids)], skip_special_tokens=False)
        return text


class ByteLevelDetokenizer:
    """The detokenizer for vocabularies of byte strings. Ids outside the vocabulary have no text."""

    __slots__ = ("_decoder", "_held", "_token_bytes", "_whole")

    def __init__(self, token_bytes: Sequence[bytes], whole: dict[TokenId, str]) -> None:
        """`whole` are texts of tokens that begin and end with whole characters; more are added."""
        self._token_bytes = token_bytes
        self._whole = whole
        # `replace` substitutes maximal ill-formed subsequences, as Rust's from_utf8_lossy in `tokenizers` does.
        self._decoder = IncrementalDecoder(errors="replace")
        self._held = False
        """True inside a character."""

    def step(self, token_id: TokenId) -> str:
        held = self._held
        if not held and (text := self._whole.get(token_id)) is not None:
            return text
        try:
            text = self._decoder.decode(self._token_bytes[token_id])
        except IndexError:
            return ""
        self._held = bool(self._decoder.buffer)
        if not held and not self._held:
            self._whole[token_id] = text
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


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
    Raises TokenizerError if there are too many.
    """
    alphabet = byte_alphabet()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if (size := max(vocabulary.values(), default=-1) + 1) > MAX_TOKEN_IDS:
        raise TokenizerError(f"it has the token id {size - 1}, above {MAX_TOKEN_IDS - 1}")
    table = [b""] * size
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
