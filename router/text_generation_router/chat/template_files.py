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

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import orjson
from jinja2.nodes import Const, For, Getattr, Getitem, Name, Node, Template, Test

from text_generation_common.exit_codes import CannotServe
from text_generation_common.model_files import ModelFileError, find_file, read_file
from text_generation_router.chat.template_job import template_environment
from text_generation_router.config import RouterSettings

DEFAULT, TOOL_USE = "default", "tool_use"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Variables of a template that hold the text of a token."""
MAX_FILE_BYTES = 16 << 20
"""A larger file is not read. tokenizer_config.json may list all added tokens."""
MAX_TEMPLATE = 128 << 10
"""Limit of the characters of one template, which takes half a second to parse; those of known models have up to 30,000."""
MAX_SPECIAL_TOKEN = 1024
"""Limit of the characters of a special token's text, which every conversation may contain."""


class ChatTemplateError(CannotServe):
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
    reading_parts: frozenset[str] = frozenset()
    """Names of the templates that go through the content of messages, and do not ask if it is a text."""

    @classmethod
    def load(
        cls, folder: Path, *, tokenizer_config: Path | None = None, override: str | None = None
    ) -> "ChatTemplates":
        """Find the templates of the model in `folder`. Raises ChatTemplateError for files that cannot be read or parsed."""
        special_tokens: dict[str, str] = {}
        try:
            sources = _find(folder, tokenizer_config, override)
            configs = [find_file(folder, name) for name in ("special_tokens_map.json", "tokenizer_config.json")]
            if tokenizer_config is not None:
                configs.append(tokenizer_config)
            for path in configs:
                special_tokens |= _special_tokens(path)
        except ModelFileError as error:
            raise ChatTemplateError(str(error)) from error
        usable = {name: sources[name] for name in (DEFAULT, TOOL_USE) if name in sources}
        trees = {name: _parsed(name, text) for name, text in usable.items()}
        using_tools = frozenset(name for name, tree in trees.items() if _reads_tools(tree))
        return cls(sources, special_tokens, using_tools, frozenset(name for name in trees if _reads_parts(trees[name])))

    @property
    def default_text(self) -> str:
        """The template for requests without tools; empty without one."""
        return self.sources.get(DEFAULT, "")

    def choose(self, *, tools_given: bool) -> str | None:
        """Return the name of the template for a request; None without one."""
        name = TOOL_USE if tools_given and TOOL_USE in self.sources else DEFAULT
        return name if name in self.sources else None


def load_templates(config: RouterSettings, folder: Path) -> "ChatTemplates":
    """Load the chat templates of the model in `folder`, or those that the settings name. Raises ChatTemplateError."""
    return ChatTemplates.load(
        folder,
        tokenizer_config=Path(config.tokenizer_config_path) if config.tokenizer_config_path else None,
        override=config.chat_template,
    )


def _find(folder: Path, tokenizer_config: Path | None, override: str | None) -> dict[str, str]:
    if override:
        return _override(override)
    if tokenizer_config is not None:
        if not tokenizer_config.is_file():
            raise ChatTemplateError(f"there is no file {tokenizer_config}")
        if found := _from_json(tokenizer_config):
            return found
    files = {DEFAULT: find_file(folder, "chat_template.jinja")}
    more = "additional_chat_templates"
    files |= {path.stem: find_file(folder, f"{more}/{path.name}") for path in sorted((folder / more).glob("*.jinja"))}
    if found := {name: _read_text(path) for name, path in files.items() if path.is_file()}:
        return found
    for name in ("chat_template.json", "tokenizer_config.json", "processor_config.json"):
        if found := _from_json(find_file(folder, name)):
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


def _special_tokens(path: Path) -> dict[str, str]:
    """Return the texts of special tokens in a JSON file, each given as a text or an object with `content`."""
    config, found = _read_object(path), {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            if len(text) > MAX_SPECIAL_TOKEN:
                raise ChatTemplateError(f"{path}: {name} has more than {MAX_SPECIAL_TOKEN} characters")
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
        return read_file(path, MAX_FILE_BYTES).decode()
    except OSError as error:
        raise ChatTemplateError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ChatTemplateError(f"{path} is not UTF-8") from error


def _parsed(name: str, text: str) -> Template:
    if len(text) > MAX_TEMPLATE:
        raise ChatTemplateError(f"chat template {name!r} has more than {MAX_TEMPLATE} characters")
    try:
        return template_environment().parse(text)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"chat template {name!r}, line {error.lineno}: {error.message}") from error
    except RecursionError as error:
        raise ChatTemplateError(f"chat template {name!r} is nested too deeply") from error


def _reads_tools(tree: Template) -> bool:
    return any(node.name == "tools" and node.ctx == "load" for node in tree.find_all(Name))


def _reads_parts(tree: Template) -> bool:
    def is_content(node: Node) -> bool:
        match node:
            case Name(name="content") | Getattr(attr="content") | Getitem(arg=Const(value="content")):
                return True
        return any(map(is_content, node.iter_child_nodes()))

    loops = any(is_content(loop.iter) for loop in tree.find_all(For))
    return loops and not any(test.name == "string" for test in tree.find_all(Test))
