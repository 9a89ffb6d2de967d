"""The names that vLLM and TensorRT-LLM give to the same metrics, for their dashboards and for gateways that read them.

Nothing is counted twice: each is another name of a metric of ours, with the labels that dashboards select by.
"""

import time
from collections.abc import Collection, Iterator, Mapping

from text_generation_proto.values import FinishReason
from text_generation_router.error_attributes import Outcome
from text_generation_router.metrics.instruments import (
    Counter,
    Histogram,
    Registry,
    RenamedHistogram,
    head_text,
    labels_text,
    reading_text,
)
from text_generation_router.metrics.scheduler import requests_of_adapters
from text_generation_router.scheduling.scheduler import Scheduler

VLLM, TRTLLM = "vllm:", "trtllm_"
PREFIXES = {"vllm": VLLM, "trtllm": TRTLLM}
"""The values of --metric-names that are not TGI's, and the prefixes of their names."""

_BOTH = {
    "e2e_request_latency_seconds": "tgi_request_duration",
    "time_to_first_token_seconds": "text_generation_time_to_first_token_seconds",
    "request_queue_time_seconds": "tgi_request_queue_duration",
    "request_inference_time_seconds": "tgi_request_inference_duration",
    "request_prefill_time_seconds": "text_generation_request_prefill_seconds",
    "request_decode_time_seconds": "text_generation_request_decode_seconds",
}
_HISTOGRAMS = {
    **{f"{prefix}{name}": source for prefix in (VLLM, TRTLLM) for name, source in _BOTH.items()},
    "vllm:inter_token_latency_seconds": "text_generation_inter_token_seconds",
    "vllm:time_per_output_token_seconds": "text_generation_inter_token_seconds",  # its older name
    "vllm:request_time_per_output_token_seconds": "tgi_request_mean_time_per_token_duration",
    "vllm:request_prompt_tokens": "tgi_request_input_length",
    "vllm:request_generation_tokens": "tgi_request_generated_tokens",
    "vllm:request_max_num_generation_tokens": "tgi_request_max_new_tokens",
    "vllm:request_params_max_tokens": "tgi_request_max_new_tokens",
    "trtllm_time_per_output_token_seconds": "tgi_request_mean_time_per_token_duration",
}
_DRAFTED = "text_generation_spec_decode_draft_tokens_total"
_ACCEPTED = "text_generation_spec_decode_accepted_tokens_total"
_COUNTERS = {
    "vllm:prompt_tokens_total": "text_generation_prompt_tokens_total",
    "vllm:generation_tokens_total": "text_generation_generated_tokens_total",
    "vllm:spec_decode_num_drafts_total": "text_generation_spec_decode_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total": _DRAFTED,
    "vllm:spec_decode_num_accepted_tokens_total": _ACCEPTED,
    "trtllm_prompt_tokens_total": "text_generation_prompt_tokens_total",
    "trtllm_spec_decode_drafted_tokens_total": _DRAFTED,
    "trtllm_spec_decode_accepted_tokens_total": _ACCEPTED,
}


_READINGS = {
    "vllm:num_requests_running": ("gauge", "running"),
    "vllm:num_requests_waiting": ("gauge", "waiting"),
    "vllm:kv_cache_usage_perc": ("gauge", "kv_usage"),
    "vllm:gpu_cache_usage_perc": ("gauge", "kv_usage"),  # its older name
    "vllm:num_preemptions_total": ("counter", "preemptions"),
    "vllm:prefix_cache_queries_total": ("counter", "prompt_tokens"),
    "vllm:prefix_cache_hits_total": ("counter", "hit_tokens"),
    "trtllm_kv_cache_hit_rate": ("gauge", "hit_rate"),
    "trtllm_prompt_cached_tokens_total": ("counter", "hit_tokens"),
}
"""Name → kind, field of the statistics."""
_REASONS = {
    "stop": (FinishReason.EOS_TOKEN.value, FinishReason.STOP_SEQUENCE.value),
    "length": (FinishReason.LENGTH.value,),
    "abort": (Outcome.CANCELLED.value, Outcome.EXPIRED.value),
    "error": (Outcome.ERROR.value,),
}
"""vLLM's reasons, and ours. vLLM does not count refused requests."""


def add_further_names(registry: Registry, scheduler: Scheduler, names: Collection[str], model: str) -> None:
    """Show the metrics of a registry under further names: "vllm", "trtllm"; `model` is the label model_name."""
    for prefix in (prefix for name, prefix in PREFIXES.items() if name in names):
        labels = {"model_name": model} | ({"engine": "0"} if prefix == VLLM else {"engine_type": "text-generation"})
        for name, source in _HISTOGRAMS.items():
            if name.startswith(prefix):
                registry.add(RenamedHistogram, registry.find(Histogram, source), name, labels)
        registry.add(_FurtherCounters, registry, scheduler, prefix, labels)


class _FurtherCounters:
    """Gauges and counters of one prefix; an Instrument. A scrape takes the scheduler's statistics once."""

    def __init__(self, registry: Registry, scheduler: Scheduler, prefix: str, labels: Mapping[str, str]) -> None:
        self._scheduler = scheduler
        self._prefix, self._labels = prefix, labels
        sources = {name: source for name, source in _COUNTERS.items() if name.startswith(prefix)}
        self._counters = {name: registry.find(Counter, source) for name, source in sources.items()}
        self._finished = registry.find(Counter, "text_generation_requests_finished_total")

    def text(self) -> str:
        return "".join(self._lines())

    def _lines(self) -> Iterator[str]:
        stats, braces = self._scheduler.stats(time.monotonic()), labels_text(self._labels)
        for name, counter in self._counters.items():
            yield reading_text(name, f"The same as {counter.name}", "counter", sum(counter.counts.values()), braces)
        for name, (kind, field) in _READINGS.items():
            if name.startswith(self._prefix):
                yield reading_text(name, "See docs/api.md", kind, getattr(stats, field), braces)
        name = f"{self._prefix}request_success_total"
        yield head_text(name, "Generations that ended, by reason", "counter")
        for reason, ours in _REASONS.items():
            count = sum(self._finished.counts[each] for each in ours)
            yield f"{name}{labels_text({**self._labels, 'finished_reason': reason})} {count}.0\n"
        if self._prefix == VLLM:
            config = {"block_size": str(stats.block_size), "num_gpu_blocks": str(stats.num_blocks)}
            name = "vllm:cache_config_info"
            yield reading_text(name, "Size of the KV cache", "gauge", 1, labels_text({**self._labels, **config}))
            yield self._adapters()

    def _adapters(self) -> str:
        """The LoRA adapters that run and wait, as labels, and the time, by which gateways find the newest."""
        running, waiting = (
            ",".join(adapter for adapter, count in counts.items() if count)
            for counts in requests_of_adapters(self._scheduler)
        )
        if not (held := len(self._scheduler.capacity.adapters)):
            return ""
        places = max((each.spec.max_loras for each in self._scheduler.serving), default=0)
        labels = {"max_lora": str(places or held), "waiting_lora_adapters": waiting, "running_lora_adapters": running}
        name = "vllm:lora_requests_info"
        return reading_text(name, "LoRA adapters in use", "gauge", time.time_ns() / 1e9, labels_text(labels))
