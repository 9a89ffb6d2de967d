"""Parse `--trtllm-options` and check the names of the options.

The options are keyword arguments of `tensorrt_llm.LLM`, in YAML as for `trtllm-serve --config`, or in JSON. TensorRT-LLM checks their
values. Their names are checked here, so that the error can suggest the nearest known name.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from reprlib import repr as shortened

import yaml

from text_generation_shard.engine import EngineError

FLAG = "--trtllm-options"
MAX_BYTES = 1 << 20
"""Largest file that is read."""
_TOKENIZES = "the router tokenizes, with the tokenizer of --model-id"
_STARTS = "the launcher chooses the GPUs and starts the processes"
_STATISTICS = "always on: sequence and metrics depend on the statistics"
RESERVED: Mapping[str, str] = {
    "model": "use --model-id",
    "revision": "use --revision",
    "dtype": "use --dtype",
    "load_format": "use --load-format",
    "tensor_parallel_size": "use --num-shard",
    "pipeline_parallel_size": "a replica splits each layer over the GPUs of --num-shard",
    "context_parallel_size": "a replica splits each layer over the GPUs of --num-shard",
    "trust_remote_code": "code in model folders is never run",
    "backend": "the model folder decides",
    "tokenizer": _TOKENIZES,
    "tokenizer_mode": _TOKENIZES,
    "tokenizer_revision": _TOKENIZES,
    "custom_tokenizer": _TOKENIZES,
    "skip_tokenizer_init": _TOKENIZES,
    "num_postprocess_workers": "the router converts tokens to text",
    "postprocess_tokenizer_dir": "the router converts tokens to text",
    "reasoning_parser": "use --split-reasoning",
    "max_beam_width": "a request is one sequence",
    "gather_generation_logits": "the model folder decides",
    "enable_iter_perf_stats": _STATISTICS,
    "cache_transceiver_config": "prefill and decoding are not split between servers here",
    "orchestrator_type": _STARTS,
    "gpus_per_node": _STARTS,
    "mpi_session": _STARTS,
    "ray_placement_config": _STARTS,
    "ray_worker_extension_cls": _STARTS,
    "mm_encoder_only": "the server generates text",
    "encode_only": "the server generates text",
    "decoding_config": "use speculative_config",
    "enable_lora": "use --lora-adapters",
}
"""Options that the server sets itself → the flag to use instead, or the reason."""


class _Malformed(Exception):
    """The text cannot be parsed; the message does not name its source."""


def read_options(text: str) -> dict[str, object]:
    """Return the options in `text`, or in the file that `text` names; empty if it is blank. Raises EngineError.

    Text that begins with `{`, or contains a newline or `: `, is YAML or JSON itself; any other text is a path.
    """
    if not text.strip():
        return {}
    inline = text.lstrip().startswith("{") or "\n" in text or ": " in text
    source = FLAG if inline else f"{FLAG}: {text if text.isprintable() else repr(text)}"
    try:
        return _parse(text if inline else _read(Path(text)))
    except _Malformed as malformed:
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


def check_nested(options: Mapping[str, object], *, keeps_events: bool) -> None:
    """Raise EngineError for an option whose effect harms the server. `keeps_events`: those of the KV cache pile up unread (1.2)."""
    cache = options.get("kv_cache_config")
    if keeps_events and isinstance(cache, Mapping) and cache.get("event_buffer_max_size"):
        raise EngineError(
            f"{FLAG}: kv_cache_config: event_buffer_max_size needs TensorRT-LLM 1.3: before, events that are not read fill "
            "the memory"
        )


def _check_fields(option: str, value: Mapping[object, object], fields: Collection[str]) -> None:
    for name in value:
        if name not in fields:
            nearest = _nearest(str(name), fields)
            instead = f", the nearest is {nearest}" if nearest else ""
            raise EngineError(f"{FLAG}: {option} has no field {shortened(name)}{instead}")


def _nearest(name: str, names: Iterable[str]) -> str:
    return next(iter(get_close_matches(name, sorted(names), n=1)), "")


def _read(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():
            raise _Malformed("is not a file")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        example = "'{max_num_tokens: 4096}'"
        raise _Malformed(f"there is no such file (options can also be given inline: {example})") from None
    except (OSError, ValueError) as error:
        raise _Malformed(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_BYTES:
        raise _Malformed(f"is longer than {MAX_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _Malformed(f"is not UTF-8: {error.reason} at byte {error.start}") from None


def _parse(text: str) -> dict[str, object]:
    try:
        options = _parse_json(text) if text.lstrip().startswith("{") else None
        if options is None:
            _check_nodes(yaml.compose(text, Loader=yaml.SafeLoader))
            options = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark is not None else ""
        raise _Malformed(where + ", ".join(part for part in (error.context, error.problem) if part)) from None
    except yaml.YAMLError as error:
        raise _Malformed(str(error).partition("\n")[0]) from None
    except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError) as error:
        # Raised by PyYAML's constructors for values that do not fit their tag, such as `2026-02-30` or `!!int ''`.
        raise _Malformed(
            f"a value does not fit its type ({type(error).__name__}: {error})".partition("\n")[0]
        ) from None
    except RecursionError:
        raise _Malformed("is nested too deeply") from None
    if options is None:
        return {}  # only comments
    if not isinstance(options, dict):
        raise _Malformed(f"must be names with values, as in `max_num_tokens: 4096`, not {shortened(options)}")
    return options


def _parse_json(text: str) -> dict[str, object] | None:
    """Return the object in `text`; None if it is not JSON (it may be YAML in braces).

    JSON is not always YAML: `1e-3` is a string in YAML 1.1, and tabs are refused.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        values: dict[str, object] = {}
        for name, value in pairs:
            if name in values:
                raise _Malformed(f"{shortened(name)} is there twice")
            values[name] = value
        return values

    try:
        parsed: dict[str, object] = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError:
        return None
    return parsed


def _check_nodes(root: yaml.Node | None) -> None:
    """Refuse text that `safe_load` would read differently from how it looks."""
    if isinstance(root, yaml.MappingNode):
        for key, _ in root.value:
            if key.tag != "tag:yaml.org,2002:str":
                name = shortened(key.value if isinstance(key, yaml.ScalarNode) else f"a {key.id}")
                raise _Malformed(f"{_line(key)}: the name {name} is not read as text: put it in quotes")
    seen: set[int] = set()
    pending = [] if root is None else [root]
    while pending:
        node = pending.pop()
        if id(node) in seen:
            # An alias: a few of them can stand for a huge value, or for one that contains itself.
            raise _Malformed(f"{_line(node)}: anchors are not supported: repeat the value")
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            pending += node.value
        elif isinstance(node, yaml.MappingNode):
            _check_unique(node)
            pending += [part for pair in node.value for part in pair]


def _check_unique(mapping: yaml.MappingNode) -> None:
    """Refuse duplicate names, of which `safe_load` silently keeps the last."""
    names: set[tuple[str, str]] = set()
    for key, _ in mapping.value:
        if isinstance(key, yaml.ScalarNode):
            if (key.tag, key.value) in names:
                raise _Malformed(f"{_line(key)}: {shortened(key.value)} is there twice")
            names.add((key.tag, key.value))


def _line(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"
