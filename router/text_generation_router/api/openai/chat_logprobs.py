"""Log-probabilities in the shape of OpenAI's chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from text_generation_router.generation import Piece
from text_generation_router.request import LogprobJson, TokenId
from text_generation_router.text.tokenizer import Tokenizer

Json = dict[str, Any]

IMPOSSIBLE = b"-9999.0"
"""OpenAI's word for a token that could not come: its clients expect a number."""


def content_logprobs(pieces: Sequence[Piece], tokenizer: Tokenizer) -> Json:
    """The `logprobs` of a choice; the token that ended the text is no part of its content."""
    content = [
        {
            # A chosen token could come: null says that nobody knows how probable it was.
            **_token(piece.token_id, orjson.Fragment(piece.logprob), tokenizer),
            "top_logprobs": [_token(token_id, number(logprob), tokenizer) for token_id, logprob in piece.top],
        }
        for piece in pieces
        if not piece.special
    ]
    return {"content": content, "refusal": None}


def number(logprob: LogprobJson) -> orjson.Fragment:
    """The log-probability of a token that was not chosen: a number in any case."""
    return orjson.Fragment(IMPOSSIBLE if logprob == b"null" else logprob)


def _token(token_id: TokenId, logprob: orjson.Fragment, tokenizer: Tokenizer) -> Json:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": logprob,
        "bytes": list(tokenizer.token_bytes(token_id)),
    }
