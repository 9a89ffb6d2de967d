"""What generate_async returns: a handle that folds items in as it is read, and yields itself. 1.2.1: executor/result.py."""

from __future__ import annotations

import time
import traceback
import weakref
from collections import deque
from collections.abc import Generator
from queue import Empty
from typing import TYPE_CHECKING, Any, NoReturn, Self

from trtllm_standin.completion import CompletionOutput, extend, fold
from trtllm_standin.errors import ErrorResponse, RequestError
from trtllm_standin.queues import ends_of, make_queue
from trtllm_standin.responses import Response

if TYPE_CHECKING:
    from trtllm_standin.executor import GenerationExecutor

NO_LOOP = "The asyncio event loop was not present during initialization, so async operations are not available."


class GenerationResultBase:
    """The outputs of one request, and how items are folded into them."""

    __module__ = "tensorrt_llm.executor.result"

    id: int
    sampling_params: Any
    tokenizer: Any
    _outputs: list[CompletionOutput]
    _done: bool
    _background_errors: deque[Exception]
    _executor: weakref.ref[GenerationExecutor]

    @property
    def outputs(self) -> list[CompletionOutput]:
        """One a sequence; `n` of `best_of`."""
        return self._outputs[: self.sampling_params.n]

    @property
    def finished(self) -> bool:
        """Whether all sequences have ended. Stays False after a RequestError."""
        return self._done

    def clear_logprob_params(self) -> None:
        """Nothing is kept here that would have to be cleared."""

    def record_stats(self, output: CompletionOutput, stats: dict[str, float] | None = None) -> None:
        """Not imitated: `metrics_dict` stays empty."""

    def do_tracing(self, output: CompletionOutput, req_perf_metrics_dict: dict[str, float] | None = None) -> None:
        """Not imitated."""

    def _handle_sequence(self, output: CompletionOutput, response: Response) -> None:
        params = self.sampling_params
        stops = params._get_stop_reasons_and_words() if response.finish is not None else ()
        fold(output, response, stops, params.include_stop_str_in_output)

    def _handle_response(self, response: Response | ErrorResponse | BaseException) -> None:
        if not isinstance(response, Response):
            self._fail(response)
        self._done = response.is_final
        self.decoding_iter = iteration = response.iteration
        self.cached_tokens = response.cached_tokens
        output = self._outputs[response.index]
        if response.is_plain and self.tokenizer is None:
            extend(output, response)
        else:
            self._handle_sequence(output, response)
        self.avg_decoded_tokens_per_iter = output.length / iteration if iteration else None
        # Looked at after each item: whoever reads first gets what happened to the engine.
        if self._background_errors and (executor := self._executor()) is not None:
            executor.handle_background_error()

    def _fail(self, response: ErrorResponse | BaseException) -> NoReturn:
        """Raise what came in the place of tokens.

        The request is not marked done (result.py raises before it gets there), and the executor knows it no more: to ask
        for another item is to wait for ever.
        """
        error = RequestError(response.error_msg) if isinstance(response, ErrorResponse) else response
        self._last_error: str | None = str(error)
        # utils.py, print_traceback_on_error: each of them shows on stderr as well.
        traceback.print_exception(error)
        raise error


class DetokenizedGenerationResultBase(GenerationResultBase):
    """With text, where there is a tokenizer and the request wants it."""

    __module__ = "tensorrt_llm.executor.result"

    def _handle_sequence(self, output: CompletionOutput, response: Response) -> None:
        super()._handle_sequence(output, response)
        if self.tokenizer is None:
            return
        output._last_text_len = len(output.text)
        special = self.sampling_params.skip_special_tokens
        output.text = self.tokenizer.decode(output.token_ids, skip_special_tokens=special)


class GenerationResult(GenerationResultBase):
    """The results of one request, to be read.

    Leaving an `async for` does not stop the request (issues #10879, #6298): call `abort`. Whoever made it inside a
    running loop reads it there; made outside one, it can only be read synchronously.
    """

    __module__ = "tensorrt_llm.executor.result"

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: list[int],
        sampling_params: Any,  # noqa: ANN401 - SamplingParams of either release
        executor: GenerationExecutor,
        *,
        trace_headers: Any = None,  # noqa: ANN401 - passed through
    ) -> None:
        self.id = request_id
        self.sampling_params = sampling_params
        self.postproc_params: Any = None
        self.disaggregated_params: Any = None
        self.trace_headers = trace_headers
        self.decoding_iter = 0
        self.cached_tokens = 0
        self.avg_decoded_tokens_per_iter: float | None = None
        self.metrics_dict: dict[str, float] = {}
        self.use_trtllm_sampler = executor.uses_trtllm_sampler
        self.tokenizer: Any = None
        self._prompt_token_ids = prompt_token_ids
        self._prompt: str | None = None
        self._outputs = [CompletionOutput(i) for i in range(sampling_params.best_of or sampling_params.n)]
        self._done = False
        self._aborted = False
        self._last_error: str | None = None
        self._background_errors = executor.errors
        # A weak reference: after the LLM is gone, abort fails with AttributeError (result.py).
        self._executor = weakref.ref(executor)
        self.inlet = make_queue()
        """Where the engine puts items."""
        self.aqueue, self.queue = ends_of(self.inlet)

    @property
    def request_id(self) -> int:
        """The number it is known by."""
        return self.id

    @property
    def prompt(self) -> str | None:
        """The text it was asked with, if it was a text."""
        return self._prompt

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt."""
        return self._prompt_token_ids

    @property
    def context_logits(self) -> Any:  # noqa: ANN401 - a tensor
        """Not imitated."""
        return None

    @property
    def mm_embedding_handle(self) -> dict[str, Any] | None:
        """Not imitated."""
        return None

    def abort(self) -> None:
        """Ask the engine to stop. A cancelled item follows – or none at all, for a request that still waits."""
        executor = self._executor()
        executor.abort_request(self.id)  # type: ignore[union-attr]  # the AttributeError of result.py
        self._aborted = True

    def aborted(self) -> bool:
        """Whether `abort` was called, whatever came of it."""
        return self._aborted

    def result(self, timeout: float | None = None) -> Self:
        """Wait, in this thread, until all is there. At 1.2.1 the timeout is ignored."""
        while not self._done:
            self._result_step()
        return self

    async def aresult(self) -> Self:
        """Wait until all is there."""
        while not self._done:
            await self.__anext__()
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self.aresult().__await__()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Self:
        if self._done:
            raise StopIteration
        self._result_step()
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Self:
        if self._done:
            raise StopAsyncIteration
        queue = self.aqueue
        assert queue is not None, NO_LOOP
        while not queue.items or queue.is_tainted:
            await queue.arrival()
        self._handle_response(queue.items.popleft())
        return self

    def __hash__(self) -> int:
        return hash(self.id)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        return f"{type(self).__name__}(request_id={self.id}, outputs={self.outputs}, finished={self._done})"

    def _exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            self.result(timeout)
        except RuntimeError as error:
            return error
        return None

    def _result_step(self, timeout: float | None = None) -> None:
        response = self.queue.get(timeout=timeout)
        if response is None:
            raise Empty
        self._handle_response(response)


class TimedGenerationResult(GenerationResult):
    """As main has it: `result` keeps to its timeout, and what failed can be looked up."""

    __module__ = "tensorrt_llm.executor.result"

    @property
    def error(self) -> str | None:
        """What the request failed with."""
        return self._last_error

    def result(self, timeout: float | None = None) -> Self:
        """Wait, in this thread, until all is there. Raises TimeoutError after `timeout` seconds in all."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._done:
            try:
                self._result_step(None if deadline is None else max(deadline - time.monotonic(), 0.0))
            except Empty:
                raise TimeoutError(f"request {self.id} is not finished after {timeout} s") from None
        return self

    def record_stats(
        self, output: CompletionOutput, stats: dict[str, float] | None = None, sequence_index: int = 0
    ) -> None:
        """Not imitated: `metrics_dict` stays empty."""
