"""The part of TensorRT-LLM's LLM API that this engine uses, as protocols.

Sources: tensorrt_llm/llmapi/llm.py and tensorrt_llm/executor/result.py of 1.2.1 and 1.3.0rc28. A test compares the names with
tables recorded from both releases.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol


class CompletionOutput(Protocol):
    """The cumulative output of one sequence; every item of a request holds the same object."""

    token_ids: Sequence[int]
    """All tokens so far. A matched stop sequence may be removed from the end again."""
    logprobs: Sequence[Any] | None
    """One entry per token: {id: Logprob} with the chosen token among them, or a float. Not cut with token_ids."""
    prompt_logprobs: Sequence[Any] | None
    """Entry i is for prompt token i + 1; the last entry is for the first new token."""
    finish_reason: str | None
    stop_reason: int | str | None


class RequestOutput(Protocol):
    """A request. Iterating yields the object itself after each update; leaving the iteration does not stop the request."""

    outputs: Sequence[CompletionOutput]
    cached_tokens: int
    """Prompt tokens found in the prefix cache; 0 until a response tells it."""

    def abort(self) -> None:
        """Stop the request. If it waits in the engine's own queue, its iteration never ends."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...


class LLM(Protocol):
    """The engine. All requests of a process are made, read and aborted on one event loop."""

    def generate_async(self, **arguments: Any) -> RequestOutput:  # noqa: ANN401 - TensorRT-LLM's types
        """Submit a request; return at once."""
        ...

    def get_stats_async(self, timeout: float) -> AsyncIterator[Mapping[str, Any]]:
        """Yield the statistics of iterations not read before, until none comes for `timeout` seconds."""
        ...

    def get_stats(self, timeout: float) -> Sequence[Mapping[str, Any]]:
        """Return the same. Used from 1.3 on, where it is a remote call that blocks."""
        ...

    def get_kv_cache_events_async(self, timeout: float) -> AsyncIterator[Any]:
        """Yield the events of the KV cache not read before, like `get_stats_async`; some versions yield lists of them."""
        ...

    def get_kv_cache_events(self, timeout: float) -> Sequence[Any]:
        """Return the same, like `get_stats`."""
        ...

    def shutdown(self) -> None:
        """Stop the engine and its processes. May never return."""
        ...
