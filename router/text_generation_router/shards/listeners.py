"""Listeners: the delivery of tokens and errors to the listeners of requests, on whichever replica they run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic

from typing_extensions import TypeVar

from text_generation_common.log import log
from text_generation_common.panics import as_exception
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.values import FailureCode, FinishReason
from text_generation_router.errors import (
    DeadlineExceeded,
    GenerationFailed,
    GrammarFailed,
    InvalidRequest,
    ServingError,
)
from text_generation_router.request import LogprobJson, RequestId, TokenListener, TopToken
from text_generation_router.scheduling.messages import Deliveries, Failed
from text_generation_router.shards.convert import (
    logprobs_to_json,
    prompt_tops_from_pb,
    top_tokens,
    top_tokens_by_position,
)

_ERRORS: dict[FailureCode, type[ServingError]] = {
    FailureCode.EXPIRED: DeadlineExceeded,
    FailureCode.GRAMMAR: GrammarFailed,
    FailureCode.IMAGE: InvalidRequest,
}
UNKNOWN_LOGPROB: LogprobJson = b"null"
"""The log-probability of a token in a report without them."""


Receiver = TypeVar("Receiver", default=TokenListener)
"""The kind of object that gets the tokens of a request."""
Delivered = tuple[RequestId, int, int, FinishReason | None]
"""A request, start and end of its tokens in a column, and the reason if the last one ended it."""


class Delivery(ABC, Generic[Receiver]):
    """Delivers the news of all live requests to their receivers."""

    def __init__(self) -> None:
        self._receivers: dict[RequestId, Receiver] = {}
        self._scored = set[RequestId]()
        """Requests whose client asked for log-probabilities: a report may have them for audits alone."""

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._receivers

    def add(self, request_id: RequestId, receiver: Receiver, *, scored: bool = False) -> None:
        """Deliver to `receiver` from now on; `scored`: with the log-probabilities of tokens."""
        self._receivers[request_id] = receiver
        if scored:
            self._scored.add(request_id)

    def remove(self, request_id: RequestId) -> bool:
        """Deliver nothing more for this request. Return False if it has no receiver."""
        return self._pop(request_id) is not None

    def _pop(self, request_id: RequestId) -> Receiver | None:
        self._scored.discard(request_id)
        return self._receivers.pop(request_id, None)

    def _logprobs(self, deliveries: Deliveries, report: pb.StepReport) -> Sequence[float]:
        """Return the log-probabilities of a report, none if no client of its tokens asked for them."""
        if not report.logprobs or not self._scored:
            return ()
        return () if self._scored.isdisjoint([each[0] for each in deliveries.tokens]) else report.logprobs

    @abstractmethod
    def placed(self, request_id: RequestId, cached_tokens: int, replica: int) -> None:
        """Report that a request left the queue."""

    @abstractmethod
    def moved(self, request_ids: Iterable[RequestId]) -> None:
        """Report the requests that lost their replica and wait for another one."""

    @abstractmethod
    def prompt_logprobs(self, request_id: RequestId | None, scored: pb.PromptLogprobs) -> None:
        """Deliver the log-probabilities of a prompt."""

    @abstractmethod
    def predicted(self, columns: Iterable[tuple[RequestId | None, int, int]]) -> None:
        """Report the tokens that were drafted from the predictions of requests, and those that were accepted."""

    @abstractmethod
    def tokens(self, deliveries: Deliveries, token_ids: Sequence[int], report: pb.StepReport) -> None:
        """Deliver new tokens. `token_ids` are the report's; `deliveries` refers to them by index."""

    @abstractmethod
    def failure(self, request_id: RequestId, error: ServingError) -> None:
        """End a request with an error; no-op if it has no receiver."""

    def failures(self, failures: Iterable[Failed]) -> None:
        """End requests with the errors that the scheduler gives them."""
        for failed in failures:
            if (number := failed.request_id) in self._receivers:
                log.warning("request failed", request_id=number, kind=failed.kind.value, reason=failed.message)
                self.failure(number, _error_of(failed))

    def end_all(self, error: ServingError) -> None:
        for request_id in tuple(self._receivers):
            self.failure(request_id, error)


class Listeners(Delivery[TokenListener]):
    """The listeners of all live requests. `on_satisfied` is called for a request whose listener wants no more tokens."""

    def __init__(self, on_satisfied: Callable[[RequestId], None]) -> None:
        super().__init__()
        self._on_satisfied = on_satisfied

    def placed(self, request_id: RequestId, cached_tokens: int, replica: int) -> None:
        if listener := self._receivers.get(request_id):
            listener.on_scheduled(cached_tokens, replica)

    def moved(self, request_ids: Iterable[RequestId]) -> None:
        for request_id in request_ids:
            if listener := self._receivers.get(request_id):
                listener.on_lost()

    def prompt_logprobs(self, request_id: RequestId | None, scored: pb.PromptLogprobs) -> None:
        if request_id is None or (listener := self._receivers.get(request_id)) is None:
            return
        try:
            listener.on_prompt_logprobs(logprobs_to_json(scored.logprobs), prompt_tops_from_pb(scored))
        except BaseException as error:  # noqa: BLE001 - a listener's bug, or a panic, costs its own request
            self._listener_failed(request_id, listener, as_exception(error))

    def predicted(self, columns: Iterable[tuple[RequestId | None, int, int]]) -> None:
        for request_id, drafted, accepted in columns:
            if request_id is not None and (listener := self._receivers.get(request_id)):
                listener.on_predicted(drafted, accepted)

    def tokens(self, deliveries: Deliveries, token_ids: Sequence[int], report: pb.StepReport) -> None:
        self.cached(deliveries.cached)
        tops = {at: top_tokens(top.token_ids, top.logprobs) for at, top in top_tokens_by_position(report)}
        self.columns(deliveries.tokens, token_ids, logprobs_to_json(self._logprobs(deliveries, report)), tops)

    def cached(self, found: Iterable[tuple[RequestId, int]]) -> None:
        """Report prompt tokens that a self-scheduling engine found in its own cache."""
        for request_id, tokens in found:
            if listener := self._receivers.get(request_id):
                listener.on_cached_tokens(tokens)

    def columns(
        self,
        delivered: Iterable[Delivered],
        token_ids: Sequence[int],
        logprobs: Sequence[LogprobJson],
        tops: Mapping[int, Sequence[TopToken]],
    ) -> None:
        """Deliver new tokens from columns. `logprobs` may be empty; `tops` has positions of `token_ids`."""
        logprobs = logprobs or [UNKNOWN_LOGPROB] * len(token_ids)
        no_tops: list[TopToken] = []
        listeners = self._receivers
        for request_id, start, end, reason in delivered:
            listener = listeners.get(request_id)
            if listener is None:
                continue
            try:
                for index in range(start, end):
                    last = reason if index == end - 1 else None
                    wants_more = listener.on_token(token_ids[index], logprobs[index], tops.get(index, no_tops), last)
                    if last is not None:
                        self._pop(request_id)
                    elif not wants_more:
                        self._on_satisfied(request_id)
                        break
            except BaseException as error:  # noqa: BLE001 - a listener's bug, or a panic, costs its own request
                self._listener_failed(request_id, listener, as_exception(error))

    def failure(self, request_id: RequestId, error: ServingError) -> None:
        if listener := self._pop(request_id):
            listener.on_failure(error)

    def renumber(self, request_id: RequestId, number: RequestId) -> None:
        """Let the listener of a request be that of `number`."""
        if listener := self._receivers.pop(request_id, None):
            self._receivers[number] = listener

    def _listener_failed(self, request_id: RequestId, listener: TokenListener, error: Exception) -> None:
        log.error("listener failed", request_id=request_id, exc_info=error)
        self._on_satisfied(request_id)
        listener.on_failure(GenerationFailed("internal error"))


def _error_of(failed: Failed) -> ServingError:
    """Return the client's error. An engine's message is passed on only if it is about the request."""
    if failed.kind is FailureCode.STEP:
        return GenerationFailed("the step that computed this request failed")
    return _ERRORS.get(failed.kind, GenerationFailed)(failed.message)
