"""The library's own exceptions, under the names that they are imported by."""

from __future__ import annotations

from typing import NamedTuple


class RequestError(RuntimeError):
    """A request that failed, alone. 1.2.1: executor/utils.py."""

    __module__ = "tensorrt_llm.executor.utils"


class ErrorResponse(NamedTuple):
    """What arrives in the place of tokens when a request has failed. 1.2.1: executor/utils.py."""

    client_id: int
    error_msg: str
    request_id: int


ErrorResponse.__module__ = "tensorrt_llm.executor.utils"


class EngineDeadError(RuntimeError):
    """The engine's workers are gone; every pending result raises it. Main only, PR #15816; no RequestError."""

    __module__ = "tensorrt_llm.executor"


class MixedSyncAsyncAPIError(Exception):
    """A result that was read synchronously once cannot be awaited any more. llmapi/utils.py."""

    __module__ = "tensorrt_llm.llmapi.utils"

    def __init__(self) -> None:
        super().__init__("mixing of synchronous and asynchronous reading of one queue")
