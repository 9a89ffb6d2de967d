"""Parse `--trtllm-options` and check the names of the options.

The options are keyword arguments of `tensorrt_llm.LLM`, in YAML as for `trtllm-serve --config`, or in JSON. TensorRT-LLM checks their
values. Their names are checked here, so that the error can suggest the nearest known name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from reprlib import repr as shortened

from text_generation_shard.engine import EngineError
from text_generation_shard.strict_yaml import Malformed, parse_mapping, read_text

FLAG = "--trtllm-options"
_RESERVED: Mapping[str, str] = {
    "model": "use --model-id",
    "revision": "use --revision",
    "dtype": "use --dtype",
    "load_format": "use --load-format",
    "tensor_parallel_size": "use --num-shard",
    "context_parallel_size": "a replica splits each layer over the GPUs of --num-shard",
    "trust_remote_code": "code in model folders is never run",
    "backend gather_generation_logits": "the model folder decides",
    "tokenizer tokenizer_mode tokenizer_revision custom_tokenizer skip_tokenizer_init": "the router tokenizes, with the "
    "tokenizer of --model-id",
    "num_postprocess_workers postprocess_tokenizer_dir": "the router converts tokens to text",
    "reasoning_parser": "use --split-reasoning",
    "max_beam_width": "a request is one sequence",
    "enable_iter_perf_stats": "always on: sequence and metrics depend on the statistics",
    "cache_transceiver_config": "prefill and decoding are not split between servers here",
    "orchestrator_type gpus_per_node mpi_session ray_placement_config ray_worker_extension_cls": "the launcher chooses "
    "the GPUs and starts the processes",
    "mm_encoder_only encode_only": "the server generates text",
    "decoding_config": "use speculative_config",
    "enable_lora": "use --lora-adapters",
}
RESERVED = {name: instead for names, instead in _RESERVED.items() for name in names.split()}
"""Options that the server sets itself → the flag to use instead, or the reason."""


def read_options(text: str) -> dict[str, object]:
    """Return the options in `text`, or in the file that `text` names; empty if it is blank. Raises EngineError.

    Text that begins with `{`, or contains a newline or `: `, is YAML or JSON itself; any other text is a path.
    """
    if not text.strip():
        return {}
    inline = text.lstrip().startswith("{") or "\n" in text or ": " in text
    source = FLAG if inline else f"{FLAG}: {text if text.isprintable() else repr(text)}"
    try:
        return parse_mapping(text if inline else read_text(Path(text)))
    except Malformed as malformed:
        raise EngineError(f"{source}: {malformed}") from None


def check_options(options: Mapping[str, object], known_fields: Mapping[str, Collection[str] | None] | None) -> None:
    """Raise EngineError unless every name in `options` is known to TensorRT-LLM and not set by the server.

    `known_fields` maps the keywords of the installed version to the field names of their nested models, or to None. If
    `known_fields` itself is None, only names in RESERVED are refused.
    """
    for name, value in options.items():
        if name in RESERVED:
            raise EngineError(f"{FLAG}: {name} is not set here: {RESERVED[name]}")
        if known_fields is None:
            continue
        if name not in known_fields:
            nearest = _nearest(name, {*known_fields, *RESERVED})
            instead = f", the nearest is {nearest}" if nearest else ""
            instead += f" ({RESERVED[nearest]})" if nearest in RESERVED else ""
            raise EngineError(f"{FLAG}: the installed TensorRT-LLM has no option {shortened(name)}{instead}")
        fields = known_fields[name]
        if fields is not None and isinstance(value, Mapping):
            _check_fields(name, value, fields)


def split_ranks(gpus: int, options: Mapping[str, object]) -> tuple[int, int]:
    """Return (tensor, pipeline) parallel sizes for so many GPUs. Raises EngineError."""
    stages = options.get("pipeline_parallel_size", 1)
    if not isinstance(stages, int) or isinstance(stages, bool) or stages < 1 or gpus % stages:
        raise EngineError(
            f"{FLAG}: pipeline_parallel_size must divide the number of GPUs ({gpus}, --num-shard), not {shortened(stages)}"
        )
    return gpus // stages, stages


def _check_fields(option: str, value: Mapping[object, object], fields: Collection[str]) -> None:
    for name in value:
        if name not in fields:
            nearest = _nearest(str(name), fields)
            instead = f", the nearest is {nearest}" if nearest else ""
            raise EngineError(f"{FLAG}: {option} has no field {shortened(name)}{instead}")


def _nearest(name: str, names: Iterable[str]) -> str:
    return next(iter(get_close_matches(name, sorted(names), n=1)), "")
