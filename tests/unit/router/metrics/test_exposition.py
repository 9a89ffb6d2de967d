"""/metrics has TGI's names, types and labels, and the same series from the first scrape to the last."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from text_generation_router.metrics import Metrics
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.scheduler import Scheduler

KINDS = {
    ("counter", ""): "request_count request_success",
    ("counter", "err"): "request_failure",
    ("counter", "reason"): "batch_concat",
    ("counter", "method"): "batch_inference_count batch_inference_success batch_inference_failure",
    ("gauge", ""): "queue_size batch_current_size batch_current_max_tokens batch_max_total_tokens batch_total_tokens",
    ("histogram", ""): "request_duration request_validation_duration request_queue_duration request_inference_duration "
    "request_mean_time_per_token_duration request_generated_tokens request_input_length request_max_new_tokens "
    "request_skipped_tokens batch_next_size",
    (
        "histogram",
        "method",
    ): "batch_inference_duration batch_forward_duration batch_decode_duration batch_filter_duration "
    "batch_concat_duration",
}
TGI = {f"tgi_{name}": kind for kind, names in KINDS.items() for name in names.split()}
"""Name → type, label. The skipped tokens are a histogram here, because TGI's dashboard reads their buckets."""
GATEWAYS = {
    *("trtllm_num_requests_waiting", "trtllm_num_requests_running", "trtllm_kv_cache_utilization"),
    *("trtllm_kv_cache_tokens_per_block", "trtllm_kv_cache_max_blocks"),
}
VLLM = {
    *("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"),
}
FAILURES = {"overloaded", "validation", "incomplete", "template", "generation", "dropped", "tool", "timeout"}
LABELS = {
    "tgi_request_failure": FAILURES,
    "tgi_batch_concat": {"backpressure", "wait_exceeded", "chunking"},
    "tgi_batch_concat_duration": {"decode"},
}


def some_metrics() -> Metrics:
    scheduler = Scheduler(Policy(64, 8))
    metrics = Metrics(max_input_tokens=100, max_total_tokens=200, scheduler=scheduler)
    metrics.steps.on_session(0)
    return metrics


def names(metrics: Metrics) -> list[str]:
    return [line if line[0] == "#" else line.rsplit(" ", 1)[0] for line in metrics.exposition().decode().splitlines()]


def test_every_metric_has_its_name_type_and_labels() -> None:
    families = {family.name: family for family in text_string_to_metric_families(some_metrics().exposition().decode())}
    assert families.keys() >= TGI.keys() | GATEWAYS
    assert {name for name in families if not name.startswith("text_generation_")} == TGI.keys() | GATEWAYS | VLLM
    for name, (kind, label) in TGI.items():
        labels = [
            {key: sample.labels[key] for key in sample.labels if key != "le"} for sample in families[name].samples
        ]
        assert families[name].type == kind, name
        assert {key for pairs in labels for key in pairs} == ({label} if label else set()), name
        if label:
            wanted = LABELS.get(name, {"prefill", "decode"})
            assert {pairs[label] for pairs in labels} == wanted, name
    assert {families[name].type for name in GATEWAYS} == {"gauge"}
    written = names(some_metrics())
    assert "text_generation_requests_started_total" in written
    assert not [name for name in written if name.startswith("tgi_") and "_total " in name]


def test_buckets_are_tgis() -> None:
    written = names(some_metrics())

    def bounds(name: str) -> list[str]:
        return [line.split('le="')[1].rstrip('"}') for line in written if line.startswith(f"{name}_bucket")]

    for name, (kind, label) in TGI.items():
        if kind == "histogram" and name.endswith("duration"):
            own = bounds(name)[:36]
            assert [float(bound) for bound in own[:-1]] == [0.0001 * 1.5**k for k in range(1, 36)], (name, label)
    assert [float(bound) for bound in bounds("tgi_request_input_length")[:-1]] == list(range(1, 101))
    assert [float(bound) for bound in bounds("tgi_request_generated_tokens")[:-1]] == list(range(2, 201, 2))
    assert [float(bound) for bound in bounds("tgi_batch_next_size")[:-1]] == list(range(1, 1025))
