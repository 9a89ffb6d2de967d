"""Listeners: the delivery of tokens and errors to the listeners of requests, on whichever replica they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from text_generation_proto.panics import as_exception
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.values import FailureCode
from text_generation_router.errors import DeadlineExceeded, GenerationFailed, ServingError
from text_generation_router.request import LogprobJson, RequestId, TokenListener, TopToken
from text_generation_router.scheduling.messages import Deliveries, Failed, Placement
from text_generation_router.shards.convert import logprobs_to_json, prompt_tops_from_pb, top_tokens_from_pb

UNKNOWN_LOGPROB: LogprobJson = b"null"
"""The log-probability of a token in a report without them."""

log = structlog.get_logger()


class Listeners:
    """The listeners of all live requests. `on_satisfied` is called for a request whose listener wants no more tokens."""

    def __init__(self, on_satisfied: Callable[[RequestId], None]) -> None:
        self._on_satisfied = on_satisfied
        self._listeners: dict[RequestId, TokenListener] = {}

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._listeners

    def add(self, request_id: RequestId, listener: TokenListener) -> None:
        """Deliver to `listener` from now on."""
        self._listeners[request_id] = listener

    def remove(self, request_id: RequestId) -> bool:
        """Deliver nothing more for this request. Return False if it has no listener."""
        return self._listeners.pop(request_id, None) is not None

    def scheduled(self, placement: Placement, replica: int) -> None:
        """Report that a request left the queue."""
        if listener := self._listeners.get(placement.request.id):
            listener.on_scheduled(placement.own_cached_tokens, replica)

    def lost(self, deliveries: Deliveries) -> None:
        """Report the requests that lost their replica."""
        for request_id in deliveries.moved:
            if listener := self._listeners.get(request_id):
                listener.on_lost()
        self.failures(deliveries.failed)

    def prompt_logprobs(self, request_id: RequestId | None, scored: pb.PromptLogprobs) -> None:
        """Deliver the log-probabilities of a prompt."""
        if request_id is None or (listener := self._listeners.get(request_id)) is None:
            return
        try:
            listener.on_prompt_logprobs(logprobs_to_json(scored.logprobs), prompt_tops_from_pb(scored))
        except BaseException as error:  # noqa: BLE001 - a listener's bug, or a panic, costs its own request
            self._listener_failed(request_id, listener, as_exception(error))

    def tokens(self, deliveries: Deliveries, token_ids: Sequence[int], report: pb.StepReport) -> None:
        """Deliver new tokens. `token_ids` are the report's; `deliveries` refers to them by index."""
        logprobs = logprobs_to_json(report.logprobs) or [UNKNOWN_LOGPROB] * len(token_ids)
        tops = top_tokens_from_pb(report) if report.top_tokens else {}
        no_tops: list[TopToken] = []
        listeners = self._listeners
        for request_id, cached in deliveries.cached:
            if listener := listeners.get(request_id):
                listener.on_cached_tokens(cached)
        for request_id, start, end, reason in deliveries.tokens:
            listener = listeners.get(request_id)
            if listener is None:
                continue
            try:
                for index in range(start, end):
                    last = reason if index == end - 1 else None
                    wants_more = listener.on_token(token_ids[index], logprobs[index], tops.get(index, no_tops), last)
                    if last is not None:
                        listeners.pop(request_id, None)
                    elif not wants_more:
                        self._on_satisfied(request_id)
                        break
            except BaseException as error:  # noqa: BLE001 - a listener's bug, or a panic, costs its own request
                self._listener_failed(request_id, listener, as_exception(error))

    def failures(self, failures: Sequence[Failed]) -> None:
        """Deliver errors."""
        for failed in failures:
            if listener := self._listeners.pop(failed.request_id, None):
                log.warning(
                    "request failed", request_id=failed.request_id, kind=failed.kind.value, reason=failed.message
                )
                listener.on_failure(_error(failed))

    def fail_all(self, reason: str) -> None:
        """End all requests with an error."""
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.on_failure(GenerationFailed(reason))

    def _listener_failed(self, request_id: RequestId, listener: TokenListener, error: Exception) -> None:
        log.error("listener failed", request_id=request_id, exc_info=error)
        self._on_satisfied(request_id)
        listener.on_failure(GenerationFailed("internal error"))


def _error(failed: Failed) -> ServingError:
    """Return the client's error. An engine's message is passed on only if it is about the request."""
    if failed.kind is FailureCode.EXPIRED:
        return DeadlineExceeded(failed.message)
    if failed.kind is FailureCode.STEP:
        return GenerationFailed("the step that computed this request failed")
    return GenerationFailed(failed.message)
