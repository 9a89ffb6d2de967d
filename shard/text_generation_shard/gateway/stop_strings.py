"""Stop strings: found in the text of a sequence, reported in tokens.

A shard handles no text, with this exception: a gateway written for TensorRT-LLM sends stop strings as strings and expects the
server to have the tokenizer. Only tokens leave the shard.

Tokens that complete no character belong to the token that does: together they are a *piece*, with a half-open interval of the
text. A piece is held back while it overlaps the longest suffix of the text that may still become a stop string, so a sent
token never has to be taken back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from text_generation_proto.model_files import MAX_TOKENIZER_BYTES, find_file, read_file
from text_generation_proto.panics import without_panics

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

CONTEXT_TOKENS = 5
"""Prompt tokens given to the decoder before the first new one: a leading space may depend on them."""
INCOMPLETE = "\ufffd"
"""The decoding of bytes that are no whole character yet."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens [first, last) of the sequence have the text [start, end)."""

    first: int
    last: int
    start: int
    end: int


class StopStringFinder:
    """Searches one sequence. The match that completes first wins; the longest of those that complete together."""

    __slots__ = (
        "_decode",
        "_held",
        "_in_pieces",
        "_keep",
        "_length",
        "_matchers",
        "_min_tokens",
        "_tokens",
        "matched",
        "sendable",
    )

    def __init__(self, stops: Sequence[str], decode: Callable[[int], str], *, keep: bool, min_tokens: int = 0) -> None:
        """`decode` returns the text that each token completes. With `keep` the stop string stays in the output.

        A match that completes within the first `min_tokens` tokens is ignored.
        """
        self._decode = decode
        self._keep = keep
        self._min_tokens = min_tokens
        self._matchers = [_Matcher(stop) for stop in stops]
        self._held: deque[_Piece] = deque()
        self._tokens = 0
        self._in_pieces = 0
        """Tokens that are part of a piece."""
        self._length = 0
        """Characters of the text."""
        self.sendable = 0
        """Leading tokens that may be sent. Once `matched` is set: the length of the output in tokens."""
        self.matched: str | None = None

    def feed(self, token_id: int) -> None:
        """Add the next token. Not allowed once `matched` is set."""
        text = self._decode(token_id)
        self._tokens += 1
        if not text:
            return
        start, self._length = self._length, self._length + len(text)
        self._held.append(_Piece(self._in_pieces, self._tokens, start, self._length))
        self._in_pieces = self._tokens
        if (found := self._search(start, text)) is not None:
            self._end(found)
            return
        certain = self._length - max(matcher.matched for matcher in self._matchers)
        while self._held and self._held[0].end <= certain:
            self.sendable = self._held.popleft().last

    def _search(self, start: int, text: str) -> int | None:
        """Return the position in the text of the stop string that `text` completes; None if it completes none."""
        for end, character in enumerate(text, start + 1):
            complete = [matcher.stop for matcher in self._matchers if matcher.advance(character)]
            if complete and self._tokens > self._min_tokens:
                self.matched = max(complete, key=len)
                return end - len(self.matched)
        return None

    def _end(self, position: int) -> None:
        """End the output before the stop string at `position` if a token begins there, else after it.

        A cut inside a token would drop the text before the stop string too.
        """
        cut = None if self._keep else next((piece.first for piece in self._held if piece.start == position), None)
        self.sendable = self._tokens if cut is None else cut


class _Matcher:
    """The longest prefix of one stop string that the text ends in (Knuth, Morris, Pratt 1977)."""

    __slots__ = ("_failure", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        """Length of that prefix; less than the stop string."""
        self._failure = [0, 0]
        """_failure[n]: length of the longest proper prefix of stop[:n] that is also its suffix."""
        shorter = 0
        for character in stop[1:]:
            while shorter and stop[shorter] != character:
                shorter = self._failure[shorter]
            shorter += stop[shorter] == character
            self._failure.append(shorter)

    def advance(self, character: str) -> bool:
        """Add one character. Return True if it completes the stop string."""
        stop, matched = self.stop, self.matched
        while matched and stop[matched] != character:
            matched = self._failure[matched]
        matched += stop[matched] == character
        complete = matched == len(stop)
        self.matched = self._failure[matched] if complete else matched
        return complete


class UnusableTokenizer(Exception):
    """The tokenizer is missing or cannot be read; the message is one line."""


class GatewayTokenizer:
    """The tokenizer of the model. Immutable, so calls share it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path | None) -> GatewayTokenizer:
        """Read tokenizer.json from the model folder. Takes up to a second. Raises UnusableTokenizer."""
        if folder is None or not (folder / "tokenizer.json").is_file():
            raise UnusableTokenizer("the model folder has no tokenizer.json")
        from tokenizers import Tokenizer

        try:
            data = read_file(find_file(folder, "tokenizer.json"), MAX_TOKENIZER_BYTES)
            return cls(without_panics(Tokenizer.from_str)(data.decode()))
        except Exception as error:  # the library raises nothing more precise
            raise UnusableTokenizer(f"the model folder's tokenizer.json cannot be read: {error}") from error

    def decoder_after(self, prompt: Sequence[int]) -> IncrementalDecoder:
        """Return a decoder of the tokens that follow `prompt`."""
        return IncrementalDecoder(self._tokenizer, prompt[-CONTEXT_TOKENS:])


class IncrementalDecoder:
    """Decodes the new tokens of one sequence. Control tokens are decoded too: they can be stop strings."""

    __slots__ = ("_context", "_ids", "_length", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._context = list(context)
        self._ids: list[int] = []
        self._length = 0
        """Characters returned so far."""
        self._stream: DecodeStream | None = DecodeStream(ids=self._context, skip_special_tokens=False)

    @without_panics
    def step(self, token_id: int) -> str:
        """Return the text that this token completes; empty while a character is incomplete."""
        self._ids.append(token_id)
        text = None if self._stream is None else self._step_stream(self._stream, token_id)
        if text is None:
            text = self._decode_all()
        self._length += len(text)
        return text

    def _step_stream(self, stream: DecodeStream, token_id: int) -> str | None:
        """Return None if the library's incremental decoder fails, as it does if a token changes the text before it."""
        try:
            return stream.step(self._tokenizer, token_id) or ""
        except Exception:  # noqa: BLE001 - it raises a bare Exception
            self._stream = None
            return None

    def _decode_all(self) -> str:
        """Decode everything again: exact for any decoder, but slower."""
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        whole = self._tokenizer.decode(self._context + self._ids, skip_special_tokens=False)
        return "" if whole.endswith(INCOMPLETE) else whole[len(before) + self._length :]
