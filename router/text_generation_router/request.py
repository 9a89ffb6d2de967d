"""A request proven valid, and who hears of its tokens. Frozen values: nothing below the API checks them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NewType, Protocol

from text_generation_proto.values import FinishReason, Grammar, LogprobOptions, Sampling
from text_generation_router.errors import ServingError

RequestId = NewType("RequestId", int)
TenantId = NewType("TenantId", str)
"""Who a request is for: an API key's digest, or the word of a header. "" where nobody is told apart."""
TokenId = int

LogprobJson = bytes
"""A log-probability as JSON: the shortest text of its float32, `null` where there is none.

Of a chosen token that means that the engine does not know it; of another one that it could not come.
Written once for a whole step; floats would print the digits of a float64."""


class Priority(IntEnum):
    """How urgent a request is: the smaller the sooner. Waiting makes up for it: see `scheduling.queue`."""

    SYSTEM = 0
    INTERACTIVE = 1
    DEFAULT = 2
    BULK = 3


@dataclass(frozen=True, slots=True)
class QualityOfService:
    """What a request is due: whose it is, how urgent, and until when. Times in seconds of the monotonic clock."""

    tenant: TenantId = TenantId("")
    priority: Priority = Priority.DEFAULT
    salt: str = ""
    """Prompts share their KV blocks only with prompts of the same salt."""
    first_token_by: float | None = None
    """When the client hopes for its first token; it orders the queue, and ends nothing."""
    queue_by: float | None = None
    """When it has expired, if it is still in the queue."""
    end_by: float | None = None
    """When it has expired, wherever it is."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked for, as token ids. prompt and new tokens together fit every limit."""

    id: RequestId
    prompt: tuple[TokenId, ...]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop_sequences: tuple[str, ...] = ()
    keep_stop_text: bool = True
    """Whether the stop sequence that ended a text is part of it: TGI's way; OpenAI cuts it."""
    visible_special: frozenset[TokenId] = frozenset()
    """Special tokens whose text is part of the answer (`[TOOL_CALLS]`)."""
    stop_token_ids: frozenset[TokenId] = frozenset()
    ignore_eos: bool = False
    min_new_tokens: int = 0
    """No end-of-sequence or stop token is chosen before so many new ones."""
    logprobs: LogprobOptions = LogprobOptions()
    grammar: Grammar | None = None
    qos: QualityOfService = QualityOfService()


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

    def on_prompt_logprobs(self, logprobs: Sequence[LogprobJson], tops: Sequence[Sequence[TopToken]]) -> None:
        """Log-probabilities of the prompt's tokens, before the first new token; `tops` only where asked for.

        tops[i] are the most probable tokens at prompt position i, best first; tops[0] is empty.
        """
        ...

    def on_scheduled(self, cached_tokens: int) -> None:
        """The request left the queue, with so many prompt tokens in the KV cache; again after a preemption or a move."""
        ...

    def on_failure(self, error: ServingError) -> None:
        """The request ended with an error."""
        ...
