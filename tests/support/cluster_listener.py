"""Listeners of one request to a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from text_generation_proto.values import FinishReason
from text_generation_router.errors import ServingError
from text_generation_router.request import LogprobJson, TopToken


class Listener:
    """Records tokens and errors."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.error: ServingError | None = None
        self.over = asyncio.Event()

    def on_token(
        self, token_id: int, logprob: LogprobJson, top: Sequence[TopToken], reason: FinishReason | None
    ) -> bool:
        self.tokens.append(token_id)
        if reason is not None:
            self.over.set()
        return True

    def on_prompt_logprobs(self, logprobs: Sequence[LogprobJson], tops: Iterable[Sequence[TopToken]]) -> None: ...

    def on_scheduled(self, cached_tokens: int, replica: int) -> None: ...

    def on_lost(self) -> None: ...

    def on_cached_tokens(self, cached_tokens: int) -> None: ...

    def on_failure(self, error: ServingError) -> None:
        self.error = error
        self.over.set()


class Events:
    """A listener that keeps every call."""

    def __init__(self, tokens: int = 1 << 30) -> None:
        """`tokens`: so many are wanted."""
        self.events: list[object] = []
        self.over = asyncio.Event()
        self._left = tokens

    def on_token(
        self, token_id: int, logprob: LogprobJson, top: Sequence[TopToken], reason: FinishReason | None
    ) -> bool:
        self.events.append((token_id, logprob, list(top), reason))
        self._left -= 1
        if reason is not None or not self._left:
            self.over.set()
        return self._left > 0

    def on_prompt_logprobs(self, logprobs: Sequence[LogprobJson], tops: Iterable[Sequence[TopToken]]) -> None:
        self.events.append((list(logprobs), [list(top) for top in tops]))

    def on_scheduled(self, cached_tokens: int, replica: int) -> None:
        self.events.append(("scheduled", cached_tokens, replica))

    def on_lost(self) -> None:
        self.events.append("lost")

    def on_cached_tokens(self, cached_tokens: int) -> None:
        self.events.append(("cached", cached_tokens))

    def on_failure(self, error: ServingError) -> None:
        self.events.append((type(error), str(error), error.retry_after_s))
        self.over.set()
