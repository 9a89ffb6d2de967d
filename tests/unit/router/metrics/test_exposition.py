"""/metrics has TGI's names, types and labels, and the same series from the first scrape to the last."""

from __future__ import annotations

import pytest
from metric_samples import exposition
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from text_generation_proto.values import FinishReason
from text_generation_router.metrics import Latencies, Metrics
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
VLLM_HISTOGRAMS = {
    *("e2e_request_latency_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("time_per_output_token_seconds", "request_time_per_output_token_seconds", "request_queue_time_seconds"),
    *("request_inference_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    *("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens"),
    "request_params_max_tokens",
}
VLLM_OTHERS = {
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc"),
    *("cache_config_info", "num_preemptions", "prompt_tokens", "generation_tokens", "request_success"),
    *("prefix_cache_queries", "prefix_cache_hits", "spec_decode_num_drafts", "spec_decode_num_draft_tokens"),
    "spec_decode_num_accepted_tokens",
}
"""vLLM's names, without `vllm:` and `_total` (vllm/v1/metrics/loggers.py)."""
TRTLLM = {
    *("request_success", "e2e_request_latency_seconds", "time_to_first_token_seconds", "kv_cache_hit_rate"),
    *("time_per_output_token_seconds", "request_queue_time_seconds", "prompt_tokens", "prompt_cached_tokens"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds"),
    *("spec_decode_drafted_tokens", "spec_decode_accepted_tokens"),
}
"""TensorRT-LLM's names beside the gauges (tensorrt_llm/metrics/collector.py)."""
FAILURES = {"overloaded", "validation", "incomplete", "template", "generation", "dropped", "tool", "timeout"}
LABELS = {
    "tgi_request_failure": FAILURES,
    "tgi_batch_concat": {"backpressure", "wait_exceeded", "chunking"},
    "tgi_batch_concat_duration": {"decode"},
}


def some_metrics() -> Metrics:
    return Metrics(max_input_tokens=100, max_total_tokens=200, scheduler=Scheduler(Policy(64, 8)))


def names(metrics: Metrics) -> list[str]:
    return [line if line[0] == "#" else line.rsplit(" ", 1)[0] for line in exposition(metrics.registry).splitlines()]


def test_every_metric_has_its_name_type_and_labels() -> None:
    families = {family.name: family for family in text_string_to_metric_families(exposition(some_metrics().registry))}
    assert families.keys() >= TGI.keys() | GATEWAYS
    assert {name for name in families if not name.startswith("text_generation_")} == TGI.keys() | GATEWAYS
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


def test_further_names_show_the_same_figures_with_the_labels_of_their_dashboards() -> None:
    metrics = some_metrics()
    metrics.add_names(("tgi", "vllm", "trtllm"), 'a "model"')
    latencies = Latencies(
        total_s=2.0, validation_s=0.1, queue_s=0.2, inference_s=1.7, generated_tokens=9, prefill_s=0.5
    )
    for reason in (FinishReason.EOS_TOKEN, FinishReason.STOP_SEQUENCE, FinishReason.LENGTH):
        metrics.requests.started()
        metrics.requests.succeeded(latencies, reason)
    families = {family.name: family for family in text_string_to_metric_families(exposition(metrics.registry))}
    further = {name for name in families if not name.startswith(("text_generation_", "tgi_"))}
    vllm, trtllm = {f"vllm:{name}" for name in VLLM_HISTOGRAMS | VLLM_OTHERS}, {f"trtllm_{name}" for name in TRTLLM}
    assert further == GATEWAYS | vllm | trtllm
    assert {families[f"vllm:{name}"].type for name in VLLM_HISTOGRAMS} == {"histogram"}
    for name in vllm | trtllm:
        assert {sample.labels["model_name"] for sample in families[name].samples} == {'a "model"'}, name
    for theirs, ours in (
        ("vllm:e2e_request_latency_seconds", "tgi_request_duration"),
        ("trtllm_request_queue_time_seconds", "tgi_request_queue_duration"),
        ("vllm:request_prefill_time_seconds", "text_generation_request_prefill_seconds"),
    ):
        values = [[sample.value for sample in families[name].samples] for name in (theirs, ours)]
        assert values[0] == values[1]
        assert values[0][-2:] in ([3.0, 3 * 2.0], [3.0, pytest.approx(0.6)], [3.0, 3 * 0.5])
    success = {sample.labels["finished_reason"]: sample.value for sample in families["vllm:request_success"].samples}
    assert success == {"stop": 2, "length": 1, "abort": 0, "error": 0}


async def test_openmetrics_has_exemplars_with_trace_ids() -> None:
    metrics = some_metrics()
    metrics.add_names(("vllm",), "model")
    latencies = Latencies(total_s=2.0, validation_s=0.1, queue_s=0.2, inference_s=1.7, generated_tokens=9)
    metrics.requests.succeeded(latencies, FinishReason.LENGTH, "ab" * 16)
    metrics.requests.succeeded(latencies, FinishReason.LENGTH)
    written = (await metrics.written(openmetrics=True)).decode()
    families = {family.name: family for family in openmetrics.text_string_to_metric_families(written)}
    for name in ("tgi_request_duration", "vllm:e2e_request_latency_seconds"):
        (found,) = (sample for sample in families[name].samples if sample.exemplar)
        assert (found.exemplar.labels, found.exemplar.value) == ({"trace_id": "ab" * 16}, 2.0)
        assert float(found.labels["le"]) >= 2.0
        assert found.value == 2
    assert (families["tgi_request_count"].type, families["text_generation_requests_started"].type) == (
        "unknown",
        "counter",
    )

    def plain(text: str) -> list[str]:
        return [line.split(" # ")[0] for line in text.splitlines() if line[0] != "#"]

    assert plain(written) == plain(exposition(metrics.registry)), "the same samples"
    assert "trace_id" not in exposition(metrics.registry)
