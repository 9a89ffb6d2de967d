"""`--trtllm-options`: what the operator sets in TensorRT-LLM itself, read and checked by name.

The options are keyword arguments of `tensorrt_llm.LLM`, in YAML as its own `trtllm-serve --config` takes them; JSON is as
good. Values are passed on as they are: TensorRT-LLM checks them. Names are checked here, where a wrong one can be told with
the right one.
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
"""Longest file read: no list of options is as long as that."""
_TOKENIZES = "the router tokenizes, with the tokenizer of --model-id"
_STATISTICS = "always on: admission and metrics live on the statistics"
OURS: Mapping[str, str] = {
    "model": "--model-id names the model",
    "revision": "use --revision",
    "dtype": "use --dtype",
    "load_format": "use --load-format",
    "tensor_parallel_size": "use --num-shard",
    "pipeline_parallel_size": "a replica has the GPUs of --num-shard, and spreads each layer over them",
    "context_parallel_size": "a replica has the GPUs of --num-shard, and spreads each layer over them",
    "trust_remote_code": "code that comes with a model is never run",
    "backend": "the model folder decides",
    "tokenizer": _TOKENIZES,
    "tokenizer_mode": _TOKENIZES,
    "tokenizer_revision": _TOKENIZES,
    "custom_tokenizer": _TOKENIZES,
    "skip_tokenizer_init": _TOKENIZES,
    "num_postprocess_workers": "text is made in the router",
    "postprocess_tokenizer_dir": "text is made in the router",
    "reasoning_parser": "use --split-reasoning",
    "max_beam_width": "a request is one sequence here",
    "gather_generation_logits": "the model folder decides",
    "enable_iter_perf_stats": _STATISTICS,
}
"""Options that are not the operator's, each with what to use or know instead."""


class _Malformed(Exception):
    """What is wrong with the text, without where it came from."""


def read_options(text: str) -> dict[str, object]:
    """The options that `text` holds, or the file it names; none where it is blank. Raises EngineError.

    It is taken for YAML or JSON itself where it begins with `{`, or holds a newline or `: `; else for a path.
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
    """Whether every name in `options` is one of TensorRT-LLM's, and the operator's to set. Raises EngineError.

    `known_fields`: the keywords of the installed version, each with the field names of its nested model, or None where it
    is none or not known. None: nothing is known, and only what is ours is refused.
    """
    for name, value in options.items():
        if name in OURS:
            raise EngineError(f"{FLAG}: {name} is not set here: {OURS[name]}")
        if known_fields is None:
            continue
        if name not in known_fields:
            nearest = _nearest(name, {*known_fields, *OURS})
            instead = f", the nearest is {nearest}" if nearest else ""
            instead += f" ({OURS[nearest]})" if nearest in OURS else ""
            raise EngineError(f"{FLAG}: the installed TensorRT-LLM has no option {shortened(name)}{instead}")
        fields = known_fields[name]
        if fields is not None and isinstance(value, Mapping):
            _check_fields(name, value, fields)


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
            raise _Malformed("is no file")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        example = "'{max_num_tokens: 4096}'"
        raise _Malformed(f"there is no such file (options can also be given as they are: {example})") from None
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
        # What PyYAML's constructors raise for a value that is not of its tag, as in `2026-02-30` or `!!int ''`.
        raise _Malformed(f"a value is none of its kind ({type(error).__name__}: {error})".partition("\n")[0]) from None
    except RecursionError:
        raise _Malformed("is nested too deeply") from None
    if options is None:
        return {}  # nothing but comments
    if not isinstance(options, dict):
        raise _Malformed(f"must be names with values, as in `max_num_tokens: 4096`, not {shortened(options)}")
    return options


def _parse_json(text: str) -> dict[str, object] | None:
    """The object in `text`; None if it is no JSON, but perhaps YAML in braces.

    Much JSON is YAML too, but not all: `1e-3` is a string in YAML 1.1, and tabs are refused.
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
    """Refuse what `safe_load` would make something else of than it seems to say."""
    if isinstance(root, yaml.MappingNode):
        for key, _ in root.value:
            if key.tag != "tag:yaml.org,2002:str":
                name = shortened(key.value if isinstance(key, yaml.ScalarNode) else f"a {key.id}")
                raise _Malformed(f"{_line(key)}: the name {name} is not read as text: put it in quotes")
    seen: set[int] = set()
    waiting = [] if root is None else [root]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            # An alias: a small file of them can stand for a huge value, or for one that holds itself.
            raise _Malformed(f"{_line(node)}: anchors are not read: write the value out where it is used")
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            _check_unique(node)
            waiting += [part for pair in node.value for part in pair]


def _check_unique(mapping: yaml.MappingNode) -> None:
    """`safe_load` takes the last of several in silence."""
    names: set[tuple[str, str]] = set()
    for key, _ in mapping.value:
        if isinstance(key, yaml.ScalarNode):
            if (key.tag, key.value) in names:
                raise _Malformed(f"{_line(key)}: {shortened(key.value)} is there twice")
            names.add((key.tag, key.value))


def _line(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"
