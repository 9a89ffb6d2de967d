"""The metrics of steps: TGI's tgi_batch_*, measured where this design has the same thing.

TGI prefills and decodes in turns. Here one step does both: a step that computes prompt tokens counts as
`method="prefill"`, any other as `method="decode"`; one that failed brought no prompt tokens, and is one of the others.
"""

from __future__ import annotations

from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.metrics.buckets import BATCH_SIZE_BUCKETS, DURATION_BUCKETS, SKIPPED_TOKENS_BUCKETS
from text_generation_router.metrics.gaps import TokenGaps, gap_histogram
from text_generation_router.metrics.instruments import Counter, Histogram, Instrument, Reading
from text_generation_router.scheduling.steps import Deliveries, JoinReason, Orders
from text_generation_router.shards.observer import Handled

PREFILL, DECODE = "prefill", "decode"
METHODS = (PREFILL, DECODE)
_BY_METHOD = "; steps that compute prompt tokens are method prefill, others decode"


class StepMetrics:
    """A StepObserver. What it does a step does not grow with the step's tokens, but for one set of request ids."""

    def __init__(self) -> None:
        self._count = _by_method("tgi_batch_inference_count", "Steps")
        self._success = _by_method("tgi_batch_inference_success", "Steps that went well")
        self._failure = _by_method("tgi_batch_inference_failure", "Steps that failed")
        self._duration = _durations("tgi_batch_inference_duration", "Seconds a step took the shard")
        self._forward = _durations("tgi_batch_forward_duration", "Seconds of it in the model")
        self._decode = _durations("tgi_batch_decode_duration", "Seconds to make text of a step's tokens and send it")
        self._filter = _durations("tgi_batch_filter_duration", "Seconds to record a step and drop what ended with it")
        self._concat = Counter(
            "tgi_batch_concat",
            "Times that requests from the queue joined running ones: as many waited as the ratio wants (backpressure), "
            "they waited long enough (wait_exceeded), or nothing held them back (chunking)",
            "reason",
            [reason.value for reason in JoinReason],
        )
        self._concat_duration = Histogram(
            "tgi_batch_concat_duration", "Seconds to let them join", DURATION_BUCKETS, "method", [DECODE]
        )
        self._next_size = Histogram("tgi_batch_next_size", "Requests that left the queue together", BATCH_SIZE_BUCKETS)
        self._skipped = Histogram(
            "tgi_request_skipped_tokens",
            "Tokens a step brought a request beyond the first",
            SKIPPED_TOKENS_BUCKETS,
        )
        self._gap_histogram = gap_histogram()
        self._gaps: dict[int, TokenGaps] = {}
        """By replica."""
        self._prompt_tokens = Counter("text_generation_prompt_tokens_total", "Prompt tokens computed")
        self._new_tokens = Counter("text_generation_generated_tokens_total", "New tokens given to requests")
        self._engine_queued: dict[int, int] = {}
        """By replica: requests in the queue of its engine, as of its last report."""
        self._engine_queue = Reading(
            "text_generation_engine_queued_requests",
            "Requests handed to engines that schedule for themselves, and waiting there",
            lambda: sum(self._engine_queued.values()),
        )
        self._parts = {
            method: tuple(whole.of(method) for whole in (self._duration, self._forward, self._filter, self._decode))
            for method in METHODS
        }

    def on_session(self, replica: int) -> None:
        self._gaps.setdefault(replica, TokenGaps(self._gap_histogram))

    def on_loss(self, replica: int) -> None:
        self._engine_queued.pop(replica, None)

    def on_orders(self, orders: Orders, seconds: float) -> None:
        if orders.admit:
            self._next_size.observe(len(orders.admit))
        if orders.joined is not None:
            self._concat.add(orders.joined.value)
            self._concat_duration.of(DECODE).observe(seconds)

    def on_report(self, handled: Handled) -> None:
        report = handled.report
        self._engine_queued[handled.replica] = report.queued
        if handled.steps:  # otherwise it only says that orders were applied
            self._step(handled, PREFILL if report.prefilled_slots else DECODE)
        if tokens := handled.deliveries.tokens:
            self._gaps[handled.replica].step(handled.received, {token[0] for token in tokens}, handled.alive)
            self._tokens(handled.deliveries, one_each=not report.token_counts)

    def _step(self, handled: Handled, method: str) -> None:
        report = handled.report
        self._count.add(method, handled.steps)
        if report.failed and any(failure.code == pb.FAILURE_CODE_STEP for failure in report.failed):
            self._failure.add(method, handled.steps)
            return  # nothing was measured
        self._success.add(method, handled.steps)
        duration, forward, filtering, decode = self._parts[method]
        duration.observe(report.step_ns * 1e-9 / handled.steps, handled.steps)
        forward.observe(report.forward_ns * 1e-9 / handled.steps, handled.steps)
        filtering.observe(handled.apply_s)
        decode.observe(handled.deliver_s)
        if method is PREFILL:
            self._prompt_tokens.add(count=sum(report.prefilled_tokens))

    def _tokens(self, deliveries: Deliveries, *, one_each: bool) -> None:
        requests = len(deliveries.tokens)
        if one_each:
            self._new_tokens.add(count=requests)
            self._skipped.observe(0, requests)
            return
        for _, first, end, _ in deliveries.tokens:
            self._new_tokens.add(count=end - first)
            self._skipped.observe(end - first - 1)
            self._gap_histogram.observe(0.0, end - first - 1)

    def instruments(self) -> list[Instrument]:
        return [
            self._count,
            self._success,
            self._failure,
            self._duration,
            self._forward,
            self._decode,
            self._filter,
            self._concat,
            self._concat_duration,
            self._next_size,
            self._skipped,
            self._gap_histogram,
            self._prompt_tokens,
            self._new_tokens,
            self._engine_queue,
        ]


def _by_method(name: str, documentation: str) -> Counter:
    return Counter(name, documentation + _BY_METHOD, "method", METHODS)


def _durations(name: str, documentation: str) -> Histogram:
    return Histogram(name, documentation + _BY_METHOD, DURATION_BUCKETS, "method", METHODS)
