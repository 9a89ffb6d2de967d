"""What this engine uses of TensorRT-LLM's LLM API, and nothing more: the shapes, as protocols.

Read in tensorrt_llm/llmapi/llm.py and tensorrt_llm/executor/result.py of 1.2.1 and 1.3.0rc28; a test compares the names with
tables recorded from both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol


class CompletionOutput(Protocol):
    """One sequence of a request, as far as it has come; the same object from first to last."""

    token_ids: Sequence[int]
    """All so far. A matched stop may be cut off again at the end."""
    logprobs: Sequence[Any] | None
    """An entry a token: {id: Logprob}, the chosen token among them, or a bare float; longer than token_ids after a cut."""
    prompt_logprobs: Sequence[Any] | None
    """Entry i is about prompt token i + 1; the last one is about the first new token."""
    finish_reason: str | None
    stop_reason: int | str | None


class RequestOutput(Protocol):
    """A request: iterating it yields itself, each time something came. Leaving the iteration does not stop the request."""

    outputs: Sequence[CompletionOutput]

    def abort(self) -> None:
        """Stop it. One that waits in the engine's own queue never says another word."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...


class LLM(Protocol):
    """The engine. All requests of a process are made, read and aborted on one event loop."""

    def generate_async(self, **arguments: Any) -> RequestOutput:  # noqa: ANN401 - theirs
        """Submit a request; returns at once."""
        ...

    def get_stats_async(self, timeout: float) -> AsyncIterator[Mapping[str, Any]]:
        """Statistics of the iterations since they were last asked for, until there was none for `timeout` seconds."""
        ...

    def shutdown(self) -> None:
        """End the engine and its processes. May take for ever."""
        ...
