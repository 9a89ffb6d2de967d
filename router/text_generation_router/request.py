"""A request proven valid, and who hears of its tokens. Frozen values: nothing below the API checks them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol

from text_generation_router.errors import ServingError

RequestId = NewType("RequestId", int)
TokenId = int

LogprobJson = bytes
"""A log-probability as JSON: the shortest text of its float32, `null` where there is none.

Written once for a whole step; floats would print the digits of a float64."""


class FinishReason(Enum):
    """Why a request ended normally; the values are TGI's words."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen; neutral values switch a stage off."""

    greedy: bool = True
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    seed: int = 0
    watermark: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked for, as token ids. prompt and new tokens together fit every limit."""

    id: RequestId
    prompt: tuple[TokenId, ...]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop_sequences: tuple[str, ...] = ()
    ignore_eos: bool = False
    top_n_tokens: int = 0
    prompt_logprobs: bool = False


TopToken = tuple[TokenId, LogprobJson]


class TokenListener(Protocol):
    """Hears of one request's tokens, in order. Called on the event loop; must neither block nor raise.

    One call of `on_token` with a reason, or one of `on_failure`, is the last call.
    """

    def on_token(
        self, token_id: TokenId, logprob: LogprobJson, top: Sequence[TopToken], reason: FinishReason | None
    ) -> bool:
        """One new token; `reason` says it is the last. False: enough, the request ends here."""
        ...

    def on_prompt_logprobs(self, logprobs: Sequence[LogprobJson]) -> None:
        """Log-probabilities of the prompt's tokens, before the first new token."""
        ...

    def on_scheduled(self) -> None:
        """The request left the queue; again after a preemption."""
        ...

    def on_failure(self, error: ServingError) -> None:
        """The request ended with an error."""
        ...
