"""Errors of requests."""

from __future__ import annotations

from trtllm_standin.errors import ErrorResponse, RequestError
from trtllm_standin.queues import running_loop

__all__ = ["ErrorResponse", "RequestError", "has_event_loop"]


def has_event_loop() -> bool:
    """Whether an event loop runs in this thread."""
    return running_loop() is not None
