"""Log-probabilities in the shape of OpenAI's completions: columns over the tokens of a text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from text_generation_router.api.openai.chat_logprobs import number
from text_generation_router.generation import Piece
from text_generation_router.request import LogprobJson, TokenId, TopToken
from text_generation_router.text.tokenizer import Tokenizer

Json = dict[str, Any]


class LogprobColumns:
    """Collects the columns; text offsets count characters from the beginning of the answer."""

    def __init__(self, tokenizer: Tokenizer, *, tops: int) -> None:
        self._tokenizer = tokenizer
        self._tops = tops
        self._offset = 0
        self._tokens: list[str] = []
        self._logprobs: list[orjson.Fragment | None] = []
        self._top: list[Json | None] = []
        self._offsets: list[int] = []

    def add_prompt(
        self, ids: Sequence[TokenId], logprobs: Sequence[LogprobJson], tops: Sequence[Sequence[TopToken]]
    ) -> None:
        """The prompt's tokens; nothing predicts the first."""
        for at, token_id in enumerate(ids):
            logprob = logprobs[at] if at < len(logprobs) else b"null"
            self._add(token_id, None if at == 0 or logprob == b"null" else logprob, tops[at] if at < len(tops) else ())

    def add(self, pieces: Iterable[Piece]) -> None:
        """New tokens."""
        for piece in pieces:
            self._add(piece.token_id, piece.logprob, piece.top)

    def _add(self, token_id: TokenId, logprob: LogprobJson | None, top: Sequence[TopToken]) -> None:
        text = self._tokenizer.token_text(token_id)
        self._tokens.append(text)
        self._offsets.append(self._offset)
        self._offset += len(text)
        if logprob is None:
            self._logprobs.append(None)
            self._top.append(None)
            return
        chosen = orjson.Fragment(logprob)
        self._logprobs.append(chosen)
        alternatives = {self._tokenizer.token_text(other): number(one) for other, one in top[: self._tops]}
        # OpenAI lists the chosen token in any case.
        self._top.append(alternatives if text in alternatives else {**alternatives, text: chosen})

    def copy(self) -> LogprobColumns:
        """The same columns, to go on with apart."""
        twin = LogprobColumns(self._tokenizer, tops=self._tops)
        twin._offset = self._offset
        twin._tokens, twin._logprobs = list(self._tokens), list(self._logprobs)
        twin._top, twin._offsets = list(self._top), list(self._offsets)
        return twin

    def take(self) -> Json:
        """What was added since the last call."""
        columns: Json = {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._top,
            "text_offset": self._offsets,
        }
        self._tokens, self._logprobs, self._top, self._offsets = [], [], [], []
        return columns
