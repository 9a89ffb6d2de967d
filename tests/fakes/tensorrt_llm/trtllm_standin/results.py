"""Objects that callers read: results and errors. 1.2.1: executor/result.py, executor/utils.py."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, NoReturn, Self


class RequestError(RuntimeError):
    """The failure of one request."""


class EngineDeadError(RuntimeError):
    """The engine's workers are gone; every pending result raises it. Main only, PR #15816; not a RequestError."""


class ErrorResponse(NamedTuple):
    """The item of a failed request."""

    client_id: int
    error_msg: str
    request_id: int


@dataclass(slots=True)
class Logprob:
    """The log-probability of a candidate, and its rank from 1."""

    logprob: float
    rank: int | None = None


TokenLogprobs = list[dict[int, Logprob]]


class FinishReason(Enum):
    """The reasons why a sequence ends; names as in `tensorrt_llm.bindings.executor`, values as in `finish_reason`."""

    END_ID = "stop"
    STOP_WORDS = "stop words"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class Response:
    """Output of one sequence in one iteration."""

    tokens: list[int]
    logprobs: TokenLogprobs | None = None
    """One entry per token; None if not requested."""
    prompt_logprobs: TokenLogprobs | None = None
    finish: FinishReason | None = None
    cached_tokens: int = 0
    drafted: tuple[int, int, int] | None = None
    """Accepted and drafted tokens, and drafts, of the request so far; None before late 1.3."""


@dataclass(slots=True)
class CompletionOutput:
    """The cumulative output: `token_ids` is one list that grows, until a stop token is removed from its end."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: TokenLogprobs = field(default_factory=list)
    prompt_logprobs: TokenLogprobs = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None

    def extend(self, response: Response, keeps_stop: bool) -> None:
        """Add a response."""
        tokens, logprobs = self.token_ids, self.logprobs
        tokens += response.tokens
        if response.logprobs is not None:
            logprobs += response.logprobs
            # 1.2.1 asserts so for every item. The last item of a cancelled request may hold a token without
            # log-probabilities, and the worker may change the list before it is sent: errors of this request that are no
            # RequestErrors.
            assert len(logprobs) == len(tokens), f"logprobs length: {len(logprobs)} != output.length: {len(tokens)}"
        if response.prompt_logprobs is not None:
            self.prompt_logprobs = response.prompt_logprobs
        if response.finish is FinishReason.STOP_WORDS:
            self.finish_reason, self.stop_reason = "stop", tokens[-1]
            if not keeps_stop:
                # A new, shorter list. The log-probabilities of the removed token stay (result.py trims before).
                self.token_ids = tokens[:-1]
        elif response.finish is not None:
            self.finish_reason = response.finish.value


class RequestOutput:
    """A request: adds items to its output as it is iterated, and yields itself.

    Leaving the iteration does not stop the request (issues #10879, #6298): call `abort`. It is read on the event loop on which it
    was made.
    """

    def __init__(
        self,
        request_id: int,
        keeps_stop: bool,
        abort: Callable[[int], None],
        raise_background_error: Callable[[], None],
    ) -> None:
        self.request_id = request_id
        self.outputs = [CompletionOutput()]
        self.cached_tokens = 0
        """Prompt tokens found in the prefix cache, as the last item told."""
        self.finished = False
        """True after the last item; not after an error."""
        self.items: asyncio.Queue[Response | ErrorResponse | Exception] = asyncio.Queue()
        """The engine puts items here."""
        self._keeps_stop = keeps_stop
        self._abort = abort
        self._raise_background_error = raise_background_error

    def abort(self) -> None:
        """Stop the request. A cancelled item follows, or none if the request still waits in the queue."""
        self._abort(self.request_id)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Self:
        if self.finished:
            raise StopAsyncIteration
        item = await self.items.get()
        if not isinstance(item, Response):
            self._fail(item)
        self.finished = item.finish is not None
        self.cached_tokens = item.cached_tokens
        if item.drafted is not None:
            # py_executor.py, _handle_responses: None without a draft, and then the number of drafts with a token at each position.
            self.spec_dec_totals = item.drafted[:2] if item.drafted[2] else None
            self.per_pos_drafted = [item.drafted[2], 0]
        self.outputs[0].extend(item, self._keeps_stop)
        # Checked after each item: the first reader gets the error of the engine.
        self._raise_background_error()
        return self

    def _fail(self, item: ErrorResponse | Exception) -> NoReturn:
        """Raise the error. The request is not marked as finished, and reading on waits forever (result.py)."""
        error = RequestError(item.error_msg) if isinstance(item, ErrorResponse) else item
        # utils.py, print_traceback_on_error: errors are printed as well.
        traceback.print_exception(error)
        raise error


class IterationResult:
    """The entries of the statistics, one object for all readers (executor/result.py, 1.2.1).

    Once none has come within the timeout it ends, and stays so until the next request is submitted (mark_undone).
    """

    def __init__(self) -> None:
        self.queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._done = False
        self._timeout = 2.0

    def set_timeout(self, timeout: float) -> None:
        """Set the time to wait for an entry."""
        self._timeout = timeout

    def mark_undone(self) -> None:
        """Expect more entries."""
        self._done = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Any]:
        if self._done:
            raise StopAsyncIteration
        try:
            return await asyncio.wait_for(self.queue.get(), self._timeout)
        except TimeoutError:
            self._done = True
            raise StopAsyncIteration from None
