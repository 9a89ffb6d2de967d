"""Objects that callers read: results, statistics, errors. 1.2.1: executor/result.py, executor/utils.py."""

from __future__ import annotations

import json
import traceback
import weakref
from collections.abc import Generator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Self

from trtllm_standin.queues import AsyncQueue, wake_readers

if TYPE_CHECKING:
    from trtllm_standin.executor import GenerationExecutor

STATS_TIMEOUT_S = 2.0


class RequestError(RuntimeError):
    """The failure of one request."""

    __module__ = "tensorrt_llm.executor.utils"


class EngineDeadError(RuntimeError):
    """The engine's workers are gone; every pending result raises it. Main only, PR #15816; not a RequestError."""

    __module__ = "tensorrt_llm.executor"


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


class Response:
    """Output of one sequence in one iteration. Rare fields have their default on the class, so that they cost nothing."""

    finish: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    """One entry per token; None if not requested."""
    prompt_logprobs: TokenLogprobs | None = None

    def __init__(self, tokens: list[int], cached_tokens: int) -> None:
        self.tokens = tokens
        self.cached_tokens = cached_tokens


@dataclass(slots=True)
class CompletionOutput:
    """The cumulative output: `token_ids` is one list that grows, until a stop token is removed from its end."""

    index: int
    text: str = ""
    token_ids: list[int] | None = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: TokenLogprobs | list[float] | None = field(default_factory=list)
    prompt_logprobs: TokenLogprobs | list[float] | None = field(default_factory=list)
    finish_reason: Literal["stop", "length", "timeout", "cancelled"] | None = None
    stop_reason: int | str | None = None
    generation_logits: Any = None
    additional_context_outputs: dict[str, Any] | None = None
    additional_generation_outputs: dict[str, Any] | None = None
    disaggregated_params: Any = None
    request_perf_metrics: Any = None
    _postprocess_result: Any = None
    _last_text_len: int = field(default=0, init=False)
    _last_token_ids_len: int = field(default=0, init=False)
    _last_logprobs_len: int = field(default=0, init=False)
    _incremental_states: dict[str, Any] | None = field(default=None, init=False)

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.token_ids or ())

    def extend(self, response: Response, stop_token_ids: list[int], keeps_stop: bool) -> None:
        """Add a response."""
        tokens, logprobs = self.token_ids, self.logprobs
        assert tokens is not None
        assert logprobs is not None
        tokens += response.tokens
        if response.logprobs is not None:
            logprobs += response.logprobs  # type: ignore[arg-type]
            # 1.2.1 asserts so for every item. The last item of a cancelled request may hold a token without
            # log-probabilities: an error of this request that is not a RequestError.
            assert len(logprobs) == len(tokens), f"logprobs length: {len(logprobs)} != output.length: {len(tokens)}"
        if response.prompt_logprobs is not None:
            self.prompt_logprobs = response.prompt_logprobs
        if response.finish is FinishReason.STOP_WORDS:
            self.finish_reason, self.stop_reason = "stop", tokens[-1]
            if not keeps_stop and tokens[-1] in stop_token_ids:
                # A new, shorter list. The log-probabilities of the removed token stay (result.py trims before).
                self.token_ids = tokens[:-1]
        elif response.finish is not None:
            self.finish_reason = response.finish.value  # type: ignore[assignment]


CompletionOutput.__module__ = Logprob.__module__ = "tensorrt_llm.executor.result"
ErrorResponse.__module__ = "tensorrt_llm.executor.utils"


class RequestOutput:
    """A request: adds items to its output as it is iterated, and yields itself.

    Leaving the iteration does not stop the request (issues #10879, #6298): call `abort`. It is read on the event loop on which it
    was made.
    """

    __module__ = "tensorrt_llm.llmapi.llm"

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: list[int],
        sampling_params: Any,  # noqa: ANN401 - SamplingParams of either release
        executor: GenerationExecutor,
    ) -> None:
        self.request_id = self.id = request_id
        self.prompt: str | None = None
        self.prompt_token_ids = prompt_token_ids
        self.sampling_params = sampling_params
        self.outputs = [CompletionOutput(0)]
        self.finished = False
        """True after the last item; not after an error."""
        self.cached_tokens = 0
        self._background_errors = executor.errors
        # After the LLM is gone, abort fails with AttributeError (result.py).
        self._executor = weakref.ref(executor)
        self.aqueue = AsyncQueue()
        """The engine puts items here."""

    def abort(self) -> None:
        """Stop the request. A cancelled item follows, or none if the request still waits in the queue."""
        executor = self._executor()
        executor.abort_request(self.request_id)  # type: ignore[union-attr]  # the AttributeError of result.py

    async def aresult(self) -> Self:
        """Wait for the end."""
        while not self.finished:
            await self.__anext__()
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self.aresult().__await__()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Self:
        if self.finished:
            raise StopAsyncIteration
        queue = self.aqueue
        while not queue.items:
            await queue.arrival()
        self._handle(queue.items.popleft())
        return self

    def _handle(self, response: Response | ErrorResponse | BaseException) -> None:
        if not isinstance(response, Response):
            self._fail(response)
        self.finished = response.finish is not None
        self.cached_tokens = response.cached_tokens
        params = self.sampling_params
        self.outputs[0].extend(response, params.stop_token_ids or [], params.include_stop_str_in_output)
        # Checked after each item: the first reader gets the error of the engine.
        if self._background_errors and (executor := self._executor()) is not None:
            executor.handle_background_error()

    def _fail(self, response: ErrorResponse | BaseException) -> NoReturn:
        """Raise the error. The request is not marked as finished, and reading on waits forever (result.py)."""
        error = RequestError(response.error_msg) if isinstance(response, ErrorResponse) else response
        # utils.py, print_traceback_on_error: errors are printed as well.
        traceback.print_exception(error)
        raise error


class IterationResult:
    """Statistics as they come, until none has come for `timeout` seconds. Two readers take each other's entries."""

    __module__ = "tensorrt_llm.executor.result"

    def __init__(self) -> None:
        self._done = False
        self._timeout = STATS_TIMEOUT_S
        self.aqueue = AsyncQueue()

    def set_timeout(self, timeout: float) -> None:
        """Set the seconds to wait for an entry."""
        self._timeout = timeout

    def mark_undone(self) -> None:
        """Allow reading again: once it has timed out, it stays empty, no matter what arrives."""
        self._done = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Any]:
        if self._done:
            raise StopAsyncIteration
        try:
            entry: dict[str, Any] = json.loads(await self.aqueue.get(self._timeout))
        except TimeoutError:
            self._done = True
            raise StopAsyncIteration from None
        return entry

    def add(self, entries: list[str]) -> None:
        """Add entries, as JSON. May be called from any thread."""
        self.aqueue.items.extend(entries)
        wake_readers([self.aqueue])


class NothingYet:
    """Returned in its place before the first request: an empty iterable without set_timeout."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Any]:
        raise StopAsyncIteration
