"""The chat templates of a model: a pure function of its folder and two settings.

The first of these sources that exists is used, alone:

    --chat-template                a file, or the template itself
    --tokenizer-config-path        that file's chat_template
    chat_template.jinja, additional_chat_templates/NAME.jinja
    chat_template.json
    tokenizer_config.json          chat_template: a text, or a list of {name, template}
    processor_config.json

Of several templates `tool_use` is for requests with tools and `default` for all others, as in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import orjson
from jinja2.nodes import Name

from text_generation_router.chat.template_job import template_environment

DEFAULT, TOOL_USE = "default", "tool_use"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Variables of a template that hold the text of a token."""
MAX_FILE_BYTES = 16 << 20
"""A larger file is not read."""


class ChatTemplateError(Exception):
    """The model's chat template cannot be used; one line for the operator."""


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """A model's templates, valid Jinja, and the texts of its special tokens."""

    sources: Mapping[str, str]
    """Template texts by name. Empty: the model has none and cannot chat."""
    special_tokens: Mapping[str, str]
    """`bos_token` and other special tokens of the model."""
    using_tools: frozenset[str]
    """Names of the templates that read the variable `tools`."""

    @classmethod
    def load(cls, folder: Path, *, tokenizer_config: Path | None = None, override: str | None = None) -> ChatTemplates:
        """Find the templates of the model in `folder`. Raises ChatTemplateError for files that cannot be read or parsed."""
        sources = _find(folder, tokenizer_config, override)
        configs = [folder / "special_tokens_map.json", folder / "tokenizer_config.json"]
        if tokenizer_config is not None:
            configs.append(tokenizer_config)
        special_tokens: dict[str, str] = {}
        for path in configs:
            special_tokens |= _special_tokens(_read_object(path))
        usable = {name: sources[name] for name in (DEFAULT, TOOL_USE) if name in sources}
        using_tools = frozenset(name for name, text in usable.items() if _reads_tools(name, text))
        return cls(sources, special_tokens, using_tools)

    @property
    def default_text(self) -> str:
        """The template for requests without tools; empty if there is none."""
        return self.sources.get(DEFAULT, "")

    def choose(self, *, tools_given: bool) -> str | None:
        """Return the name of the template for a request; None if there is none."""
        name = TOOL_USE if tools_given and TOOL_USE in self.sources else DEFAULT
        return name if name in self.sources else None


def _find(folder: Path, tokenizer_config: Path | None, override: str | None) -> dict[str, str]:
    if override:
        return _override(override)
    if tokenizer_config is not None:
        if not tokenizer_config.is_file():
            raise ChatTemplateError(f"there is no file {tokenizer_config}")
        if found := _from_json(tokenizer_config):
            return found
    files = {DEFAULT: folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if found := {name: _read_text(path) for name, path in files.items() if path.is_file()}:
        return found
    for name in ("chat_template.json", "tokenizer_config.json", "processor_config.json"):
        if found := _from_json(folder / name):
            return found
    return {}


def _override(value: str) -> dict[str, str]:
    if "{%" in value or "{{" in value or "\n" in value:
        return {DEFAULT: value}
    path = Path(value)
    if not path.is_file():
        raise ChatTemplateError(f"chat template {value!r} is neither a file nor a template")
    if path.suffix != ".json":
        return {DEFAULT: _read_text(path)}
    if found := _from_json(path):
        return found
    raise ChatTemplateError(f"{path} has no chat_template")


def _from_json(path: Path) -> dict[str, str]:
    """Return the `chat_template` of a JSON file by name; empty without the file or the key."""
    value = _read_object(path).get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    if isinstance(value, list):
        value = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
    if isinstance(value, dict) and all(isinstance(part, str) for pair in value.items() for part in pair):
        return value
    raise ChatTemplateError(f"{path}: chat_template must be a text or a list of objects with name and template")


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of special tokens, each given as a text or an object with `content`."""
    found = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty without the file."""
    if not path.is_file():
        return {}
    try:
        value = orjson.loads(_read_text(path))
    except orjson.JSONDecodeError as error:
        raise ChatTemplateError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ChatTemplateError(f"{path} is not a JSON object")
    return value


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ChatTemplateError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ChatTemplateError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ChatTemplateError(f"{path} is not UTF-8") from error


def _reads_tools(name: str, text: str) -> bool:
    try:
        tree = template_environment().parse(text)
        return any(node.name == "tools" and node.ctx == "load" for node in tree.find_all(Name))
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"chat template {name!r}, line {error.lineno}: {error.message}") from error
    except RecursionError as error:
        raise ChatTemplateError(f"chat template {name!r} is nested too deeply") from error
