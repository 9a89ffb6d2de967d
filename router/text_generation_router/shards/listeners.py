"""Who listens to which request, wherever it runs; tokens and failures on their way to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.values import FailureCode
from text_generation_router.errors import DeadlineExceeded, GenerationFailed, ServingError
from text_generation_router.request import RequestId, TokenListener, TopToken
from text_generation_router.scheduling.messages import Deliveries, Failed, Placement
from text_generation_router.shards.convert import logprobs_to_json, prompt_tops_from_pb, top_tokens_from_pb

log = structlog.get_logger()


class Listeners:
    """The listeners of all requests that go on. `enough` is called for one whose listener wants no more of it."""

    def __init__(self, enough: Callable[[RequestId], None]) -> None:
        self._enough = enough
        self._listeners: dict[RequestId, TokenListener] = {}

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._listeners

    def add(self, request_id: RequestId, listener: TokenListener) -> None:
        """`listener` hears of this request from now on."""
        self._listeners[request_id] = listener

    def remove(self, request_id: RequestId) -> bool:
        """Nobody listens any more; whether somebody did."""
        return self._listeners.pop(request_id, None) is not None

    def scheduled(self, admission: Placement) -> None:
        """A request left the queue."""
        if listener := self._listeners.get(admission.request.id):
            listener.on_scheduled(admission.cached_tokens)

    def prompt(self, owner: RequestId | None, scored: pb.PromptLogprobs) -> None:
        """A prompt was scored."""
        if owner is None or (listener := self._listeners.get(owner)) is None:
            return
        try:
            listener.on_prompt_logprobs(logprobs_to_json(scored.logprobs), prompt_tops_from_pb(scored))
        except Exception as error:  # noqa: BLE001 - a listener's bug costs its own request, not the replica
            self._listener_failed(owner, listener, error)

    def tokens(self, deliveries: Deliveries, token_ids: Sequence[int], report: pb.StepReport) -> None:
        """New tokens; `deliveries` names them by their places in `token_ids`, which are the report's."""
        logprobs = logprobs_to_json(report.logprobs)
        tops = top_tokens_from_pb(report) if report.top_tokens else {}
        nothing: list[TopToken] = []
        listeners = self._listeners
        for request_id, first, end, reason in deliveries.tokens:
            listener = listeners.get(request_id)
            if listener is None:
                continue
            try:
                for at in range(first, end):
                    last = reason if at == end - 1 else None
                    goes_on = listener.on_token(token_ids[at], logprobs[at], tops.get(at, nothing), last)
                    if last is not None:
                        listeners.pop(request_id, None)
                    elif not goes_on:
                        self._enough(request_id)
                        break
            except Exception as error:  # noqa: BLE001 - a listener's bug costs its own request, not the replica
                self._listener_failed(request_id, listener, error)

    def failures(self, failures: Sequence[Failed]) -> None:
        """Requests that ended with an error."""
        for failed in failures:
            if listener := self._listeners.pop(failed.request_id, None):
                log.warning(
                    "request failed", request_id=failed.request_id, kind=failed.kind.value, reason=failed.message
                )
                listener.on_failure(_error(failed))

    def fail_all(self, reason: str) -> None:
        """The end of everything."""
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.on_failure(GenerationFailed(reason))

    def _listener_failed(self, request_id: RequestId, listener: TokenListener, error: Exception) -> None:
        log.error("listener failed", request_id=request_id, exc_info=error)
        self._enough(request_id)
        listener.on_failure(GenerationFailed("internal error"))


def _error(failed: Failed) -> ServingError:
    """What a client is told: the engine's own words only where they are about the client's request."""
    if failed.kind is FailureCode.EXPIRED:
        return DeadlineExceeded(failed.message)
    if failed.kind is FailureCode.STEP:
        return GenerationFailed("the step that computed this request failed")
    return GenerationFailed(failed.message)
