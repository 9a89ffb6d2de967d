"""Parse `--trtllm-options` and check the names of the options.

The options are keyword arguments of `tensorrt_llm.LLM`, in YAML as for `trtllm-serve --config`, or in JSON. TensorRT-LLM checks
their values. Their names are checked here, so that the error can suggest the nearest known name.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from reprlib import repr as shortened

from text_generation_shard.engine import EngineError
from text_generation_shard.json_object import is_count

FLAG = "--trtllm-options"
_RESERVED: Mapping[str, str] = {
    "model": "use --model-id",
    "revision": "use --revision",
    "dtype": "use --dtype",
    "load_format": "use --load-format",
    "context_parallel_size": "a replica splits each layer over the GPUs of --num-shard",
    "backend gather_generation_logits": "the model folder decides",
    "tokenizer tokenizer_mode tokenizer_revision custom_tokenizer skip_tokenizer_init": "the router tokenizes, with the "
    "tokenizer of --model-id",
    "postprocess_tokenizer_dir": "the router converts tokens to text",
    "reasoning_parser": "use --split-reasoning",
    "max_beam_width": "a request is one sequence",
    "enable_iter_perf_stats": "always on: sequence and metrics depend on the statistics",
    "orchestrator_type gpus_per_node mpi_session ray_placement_config ray_worker_extension_cls": "the launcher chooses "
    "the GPUs and starts the processes",
    "mm_encoder_only encode_only": "the server generates text",
    "decoding_config": "use speculative_config",
    "enable_lora": "use --lora-adapters",
    "generation_config": "requests have all their parameters",
    "post_processor_hook batched_logits_processor kv_connector_config": "no Python code is loaded that an option names",
    "sleep_config": "nothing puts the engine to sleep",
}
RESERVED = {name: instead for names, instead in _RESERVED.items() for name in names.split()}
"""Options that the server sets itself → the flag to use instead, or the reason."""
WITHOUT_EFFECT: Mapping[str, str] = {
    "trust_remote_code": "code in model folders is never run",
    "num_postprocess_workers": "the router converts tokens to text",
    "cache_transceiver_config": "prefill and decoding are not split between servers here",
    **dict.fromkeys(
        ("num_serve_frontends", "prometheus_metrics_config", "perf_metrics_output_dir"),
        "it is for trtllm-serve's own server",
    ),
}
"""Options of NVIDIA's files for `trtllm-serve` that may be left out → the reason."""
_NEUTRAL: Mapping[str, object] = {
    "backend": "pytorch",
    "generation_config": "trtllm",
    "context_parallel_size": 1,
    "max_beam_width": 1,
    "enable_iter_perf_stats": True,
}
"""Options of RESERVED with the value that the server sets."""


def adapt_options(options: Mapping[str, object]) -> dict[str, object]:
    """Return the options of `trtllm-serve` as those of `LLM`, without those that have no effect here."""
    neutral = {*WITHOUT_EFFECT, *(name for name, value in _NEUTRAL.items() if options.get(name) == value)}
    adapted = {name: value for name, value in options.items() if name not in neutral}
    cache = adapted.get("kv_cache_config") or {}
    if isinstance(cache, Mapping) and (fraction := adapted.pop("kv_cache_free_gpu_memory_fraction", None)) is not None:
        adapted["kv_cache_config"] = {"free_gpu_memory_fraction": fraction, **cache}
    return adapted


def check_options(options: Mapping[str, object], known_fields: Mapping[str, Collection[str] | None] | None) -> None:
    """Raise EngineError unless every name in `options` is known to TensorRT-LLM and not set by the server.

    `known_fields` maps the keywords of the installed version to the field names of their nested models, or to None. If
    `known_fields` itself is None, only names in RESERVED are refused.
    """
    if problems := [problem for name, value in options.items() for problem in _problems(name, value, known_fields)]:
        raise EngineError(f"{FLAG}: {'; '.join(problems)}")


def _problems(name: str, value: object, known_fields: Mapping[str, Collection[str] | None] | None) -> Iterator[str]:
    if name in RESERVED:
        yield f"{name} is not set here: {RESERVED[name]}"
    elif known_fields is None:
        return
    elif name not in known_fields:
        nearest = _nearest(name, {*known_fields, *RESERVED}, RESERVED)
        yield f"the installed TensorRT-LLM has no option {name[:80]!r}{nearest}"
    elif isinstance(value, Mapping) and (fields := known_fields[name]) is not None:
        for field in value:
            if field not in fields:
                yield f"{name} has no field {str(field)[:80]!r}{_nearest(str(field), fields, {})}"


def split_ranks(gpus: int | None, options: Mapping[str, object]) -> tuple[int, int]:
    """Return (tensor, pipeline) parallel sizes for this number of GPUs; None: for as many as they need. Raises EngineError."""
    stages = options.get("pipeline_parallel_size", 1)
    given = "" if gpus is None else f" ({gpus}, --num-shard)"
    if not is_count(stages) or (gpus or 0) % stages:
        raise EngineError(
            f"{FLAG}: pipeline_parallel_size must divide the number of GPUs{given}, not {shortened(stages)}"
        )
    fitting = None if gpus is None else gpus // stages
    tensor = options.get("tensor_parallel_size", fitting or 1)
    if not is_count(tensor) or fitting not in (None, tensor):
        raise EngineError(f"{FLAG}: tensor_parallel_size {shortened(tensor)} does not fit the number of GPUs{given}")
    return tensor, stages


def _nearest(name: str, names: Iterable[str], reasons: Mapping[str, str]) -> str:
    if not (found := get_close_matches(name, sorted(names), n=1)):
        return ""
    return f", the nearest is {found[0]}" + (f" ({reasons[found[0]]})" if found[0] in reasons else "")
