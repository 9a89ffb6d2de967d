"""Metrics of steps: TGI's tgi_batch_*, where this design has an equivalent, and the gaps between tokens.

TGI alternates prefill and decode. Here one step does both: a step that computes prompt tokens counts as
`method="prefill"`, any other as `method="decode"`. A failed step reports no prompt tokens and counts as decode.

Reports bring the states of GPUs, too, which are shown as they are.
"""

import re
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.values import DRAFT_SOURCES, ENGINE
from text_generation_router.metrics.instruments import (
    DURATION_BUCKETS,
    Counter,
    Histogram,
    Reading,
    Registry,
    head_text,
)
from text_generation_router.request import RequestId
from text_generation_router.scheduling.messages import Deliveries, JoinReason, SchedulerOutput
from text_generation_router.shards.observer import StepRecord

THROTTLE_REASONS = (
    *("sw_power_cap", "hw_slowdown", "sync_boost", "sw_thermal_slowdown", "hw_thermal_slowdown"),
    *("hw_power_brake_slowdown", "board_limit", "reliability"),
)
"""NVML's names for the causes of lower clocks, without those that a load or a setting asks for."""

MAX_GPUS = 64
"""Most GPUs of a replica that are shown."""

_UUID = re.compile(r"[\w./-]{1,96}")

PREFILL, DECODE = "prefill", "decode"
METHODS = (PREFILL, DECODE)
_BY_METHOD = "; steps that compute prompt tokens are method prefill, others decode"

BATCH_SIZE_BUCKETS = tuple(range(1, 1025))
"""TGI's: one per size."""
SKIPPED_TOKENS_BUCKETS = tuple(range(17))
"""Ours: TGI has a summary here, though its dashboard reads buckets."""
TOKEN_GAP_BUCKETS = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.08),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0),
)
"""Seconds. Above a tenth a sequence was held up: a long prompt, a full KV cache, a preemption, a lost replica."""
MIN_SWEEP = 1024
"""Requests without a token in the last step above which those that ended are looked for."""

_DRAFTING = {
    "drafts": "steps of a sequence in which tokens were drafted",
    "draft_tokens": "tokens drafted",
    "accepted_tokens": "drafted tokens that were accepted",
}
"""Documentation by field of pb.Drafting."""


_FAMILIES = {
    "memory_used_bytes": ("Memory of the GPU in use, by any process", {"memory_used_bytes": ""}),
    "memory_total_bytes": ("Memory of the GPU", {"memory_total_bytes": ""}),
    "utilization_ratio": ("Share of the last sample period in which a kernel ran, 0 to 1", {"utilization": ""}),
    "power_watts": ("Power that the GPU draws", {"power_watts": ""}),
    "temperature_celsius": ("Temperature of the GPU", {"temperature_celsius": ""}),
    "throttled": (
        "1 while the clocks of the GPU are lowered for this reason, else 0",
        {reason: f',reason="{reason}"' for reason in THROTTLE_REASONS},
    ),
    "ecc_errors_total": (
        "ECC errors of the GPU since its driver was loaded, by kind",
        {f"{kind}_ecc_errors": f',kind="{kind}"' for kind in ("corrected", "uncorrected")},
    ),
}
"""Documentation, and the labels of fields of GpuState, or of causes in its `throttle_reasons`, by the end of the name."""


class GpuMetrics:
    """The last states of the GPUs of each replica; an Instrument. A replica without a session has none."""

    def __init__(self) -> None:
        self._states: dict[int, list[tuple[str, pb.GpuState]]] = {}
        """By replica: the labels of each GPU, and its state."""

    def update(self, replica: int, states: Iterable[pb.GpuState]) -> None:
        self._states[replica] = [
            (f'replica="{replica}",gpu="{state.index}",uuid="{state.uuid}"', state)
            for state in islice(states, MAX_GPUS)
            if _UUID.fullmatch(state.uuid)
        ]

    def states(self, replica: int) -> list[pb.GpuState]:
        return [state for _, state in self._states.get(replica, ())]

    def remove(self, replica: int) -> None:
        self._states.pop(replica, None)

    def text(self) -> str:
        return "".join(self._lines())

    def _lines(self) -> Iterator[str]:
        gpus = list(chain.from_iterable(self._states.values()))
        for suffix, (documentation, fields) in _FAMILIES.items():
            name = f"text_generation_gpu_{suffix}"
            yield head_text(name, documentation, "counter" if suffix.endswith("_total") else "gauge")
            for labels, state in gpus:
                for source, label in fields.items():
                    if source in THROTTLE_REASONS:
                        yield f"{name}{{{labels}{label}}} {float(source in state.throttle_reasons)!r}\n"
                    elif state.HasField(source):  # type: ignore[arg-type]
                        yield f"{name}{{{labels}{label}}} {float(getattr(state, source))!r}\n"


class StepMetrics:
    """Metrics updated from orders and reports: a StepObserver.

    The cost per step does not grow with its tokens, except for one set of request ids.
    """

    def __init__(self, registry: Registry) -> None:
        def by_method(name: str, documentation: str) -> Counter:
            return registry.add(Counter, name, documentation + _BY_METHOD, "method", METHODS)

        def duration(name: str, documentation: str, methods: Sequence[str] = METHODS) -> Histogram:
            suffix = _BY_METHOD if methods is METHODS else ""
            return registry.add(Histogram, name, documentation + suffix, DURATION_BUCKETS, "method", methods)

        self._count = by_method("tgi_batch_inference_count", "Steps")
        self._success = by_method("tgi_batch_inference_success", "Steps that succeeded")
        self._failure = by_method("tgi_batch_inference_failure", "Steps that failed")
        durations = (
            duration("tgi_batch_inference_duration", "Seconds per step on the shard"),
            duration("tgi_batch_forward_duration", "Seconds of it in the model"),
            duration("tgi_batch_filter_duration", "Seconds to record a step and release finished sequences"),
            duration("tgi_batch_decode_duration", "Seconds to detokenize and send the tokens of a step"),
        )
        self._durations = {method: tuple(histogram.of(method) for histogram in durations) for method in METHODS}
        self._concat = registry.add(
            Counter,
            "tgi_batch_concat",
            "Times that requests from the queue joined running ones: as many waited as the ratio requires "
            "(backpressure), they waited long enough (wait_exceeded), or no condition was set (chunking)",
            "reason",
            [reason.value for reason in JoinReason],
        )
        self._concat_duration = duration("tgi_batch_concat_duration", "Seconds to let them join", [DECODE])
        self._next_size = registry.add(
            Histogram, "tgi_batch_next_size", "Requests that left the queue together", BATCH_SIZE_BUCKETS
        )
        self._skipped = registry.add(
            Histogram, "tgi_request_skipped_tokens", "Tokens per sequence and step beyond one", SKIPPED_TOKENS_BUCKETS
        )
        self.token_gaps = registry.add(
            Histogram,
            "text_generation_inter_token_seconds",
            "Seconds between two new tokens of a request; 0 within a step",
            TOKEN_GAP_BUCKETS,
        )
        self.prompt_tokens = registry.add(Counter, "text_generation_prompt_tokens_total", "Prompt tokens computed")
        self.new_tokens = registry.add(Counter, "text_generation_generated_tokens_total", "New tokens delivered")
        self._drafting = {
            name: registry.add(
                Counter,
                f"text_generation_spec_decode_{name}_total",
                f"Speculative decoding: {what}, by source",
                "source",
                DRAFT_SOURCES,
            )
            for name, what in _DRAFTING.items()
        }
        self._gaps = TokenGaps(self.token_gaps)
        self._engine_queued: dict[int, int] = {}
        """By replica: requests in the queue of its engine, as of its last report."""
        registry.add(
            Reading,
            "text_generation_engine_queued_requests",
            "Requests in the queues of self-scheduling engines",
            lambda: sum(self._engine_queued.values()),
        )

        self.gpus = registry.add(GpuMetrics)

    def on_loss(self, replica: int) -> None:
        self._gaps.lost(replica)
        self._engine_queued.pop(replica, None)
        self.gpus.remove(replica)

    def on_orders(self, orders: SchedulerOutput, seconds: float) -> None:
        placements = [each for each in orders.placements if not each.request.replayed]
        if placements:
            self._next_size.observe(len(placements))
            for placement in placements:
                if placement.generated:
                    self._gaps.leave_out(placement.request.id)
        if placements and orders.join_reason is not None:
            self._concat.add(orders.join_reason.value)
            self._concat_duration.of(DECODE).observe(seconds)

    def on_report(self, record: StepRecord) -> None:
        report = record.report
        self._engine_queued[record.replica] = report.queued
        if report.gpus:
            self.gpus.update(record.replica, report.gpus)
        for drafting in report.drafting:
            source = drafting.source if drafting.source in DRAFT_SOURCES else ENGINE
            for name, counter in self._drafting.items():
                counter.add(source, getattr(drafting, name))
        if record.steps:  # 0: the report only acknowledges orders
            self._step(record, PREFILL if report.prefilled_slots else DECODE)
        if tokens := record.deliveries.tokens:
            self._gaps.step(record.replica, record.received, {token[0] for token in tokens}, record.alive)
            self._tokens(record.deliveries, one_each=not report.token_counts)

    def _step(self, record: StepRecord, method: str) -> None:
        report = record.report
        self._count.add(method, record.steps)
        if report.failed and any(failure.code == pb.FAILURE_CODE_STEP for failure in report.failed):
            self._failure.add(method, record.steps)
            return  # a failed step has no times
        self._success.add(method, record.steps)
        inference, forward, filtering, decode = self._durations[method]
        inference.observe(report.step_ns * 1e-9 / record.steps, record.steps)
        forward.observe(report.forward_ns * 1e-9 / record.steps, record.steps)
        filtering.observe(record.update_s)
        decode.observe(record.deliver_s)
        if method is PREFILL:
            self.prompt_tokens.add(count=sum(report.prefilled_tokens))

    def _tokens(self, deliveries: Deliveries, *, one_each: bool) -> None:
        requests = len(deliveries.tokens)
        if one_each:
            self.new_tokens.add(count=requests)
            self._skipped.observe(0, requests)
            return
        for _, first, end, _ in deliveries.tokens:
            self.new_tokens.add(count=end - first)
            self._skipped.observe(end - first - 1)
            self.token_gaps.observe(0.0, end - first - 1)


@dataclass(slots=True, eq=False)
class TokenGaps:
    """Inter-token latency: exact, at a cost per step and not per token.

    Requests that got a token in two consecutive steps of a replica all waited the time between the two reports, and are
    counted together. A request left out of a step (no free KV block, preempted, its replica lost) is remembered with the
    time of its last token until it gets another one, on any replica, so that long gaps are measured too.
    """

    histogram: Histogram
    left_out: dict[RequestId, float] = field(default_factory=dict)
    """Time of the last token of requests that were not in the last step of their replica. Some may have ended."""
    _last: dict[int, tuple[float, set[RequestId]]] = field(default_factory=dict)
    """By replica: the time of its last step, and the requests that got a token in it."""
    _sweep_above: int = MIN_SWEEP

    def step(self, replica: int, now: float, served: set[RequestId], alive: Container[RequestId]) -> None:
        """Record a step with new tokens for `served`; keeps that set. `alive`: requests that continue."""
        at, previous = self._last.get(replica, (now, set()))
        if together := len(served & previous):
            self.histogram.observe(now - at, together)
        if self.left_out:
            for request_id in self.left_out.keys() & served:
                self.histogram.observe(now - self.left_out.pop(request_id))
            if len(self.left_out) > self._sweep_above:
                self.left_out = {each: at for each, at in self.left_out.items() if each in alive}
                self._sweep_above = max(MIN_SWEEP, 2 * len(self.left_out))
        if together < len(previous):
            self.left_out.update((each, at) for each in previous - served if each in alive)
        self._last[replica] = now, served

    def leave_out(self, request_id: RequestId) -> None:
        """Remember a request apart: it was preempted, and may get its next token on another replica."""
        for at, previous in self._last.values():
            if request_id in previous:
                previous.remove(request_id)
                self.left_out[request_id] = at

    def lost(self, replica: int) -> None:
        """Remember all requests of a replica apart: its session ended."""
        at, previous = self._last.pop(replica, (0.0, ()))
        self.left_out.update(dict.fromkeys(previous, at))
