"""A listener of one request to a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from text_generation_proto.values import FinishReason
from text_generation_router.errors import ServingError
from text_generation_router.request import LogprobJson, TopToken


class Listener:
    """Keeps every call, and tokens and error apart."""

    def __init__(self, wanted: int = 1 << 30) -> None:
        """`wanted`: so many tokens are taken."""
        self.events: list[object] = []
        self.tokens: list[int] = []
        self.error: ServingError | None = None
        self.over = asyncio.Event()
        self._wanted = wanted

    def on_token(
        self, token_id: int, logprob: LogprobJson, top: Sequence[TopToken], reason: FinishReason | None
    ) -> bool:
        self.tokens.append(token_id)
        self.events.append((token_id, logprob, list(top), reason))
        if reason is not None or len(self.tokens) == self._wanted:
            self.over.set()
        return len(self.tokens) < self._wanted

    def on_prompt_logprobs(self, logprobs: Sequence[LogprobJson], tops: Iterable[Sequence[TopToken]]) -> None:
        self.events.append((list(logprobs), [list(top) for top in tops]))

    def on_scheduled(self, cached_tokens: int, replica: int) -> None:
        self.events.append(("scheduled", cached_tokens, replica))

    def on_lost(self) -> None:
        self.events.append("lost")

    def on_cached_tokens(self, cached_tokens: int) -> None:
        self.events.append(("cached", cached_tokens))

    def on_predicted(self, drafted: int, accepted: int) -> None:
        self.events.append(("predicted", drafted, accepted))

    def on_failure(self, error: ServingError) -> None:
        self.error = error
        self.events.append((type(error), str(error), error.retry_after_s))
        self.over.set()
