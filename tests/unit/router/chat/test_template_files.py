"""Sources of templates, and errors about broken files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from text_generation_router.chat.template_files import ChatTemplateError, ChatTemplates

Json = Mapping[str, object]


def write(folder: Path, files: Mapping[str, str | object]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


LAYERS: list[tuple[str, str | Json]] = [
    ("chat_template.jinja", "jinja"),
    ("chat_template.json", {"chat_template": "json"}),
    ("tokenizer_config.json", {"chat_template": "config"}),
    ("processor_config.json", {"chat_template": "processor"}),
]


@pytest.mark.parametrize("first", range(len(LAYERS)))
def test_the_first_file_wins(tmp_path: Path, first: int) -> None:
    write(tmp_path, dict(LAYERS[first:]))
    assert ChatTemplates.load(tmp_path).sources == {"default": ["jinja", "json", "config", "processor"][first]}


def test_a_file_without_a_template_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, {"chat_template.json": {}, "tokenizer_config.json": {"chat_template": None}})
    write(tmp_path, {"processor_config.json": {"chat_template": "processor"}})
    assert ChatTemplates.load(tmp_path).default_text == "processor"


def test_settings_win_over_the_folder(tmp_path: Path) -> None:
    write(tmp_path, dict(LAYERS))
    config = (
        write(tmp_path / "other", {"config.json": {"chat_template": "theirs", "eos_token": "<end>"}}) / "config.json"
    )
    write(tmp_path, {"mine.jinja": "mine\n", "mine.json": {"chat_template": "mine too"}})
    load = ChatTemplates.load
    assert load(tmp_path, tokenizer_config=config).default_text == "theirs"
    assert load(tmp_path, tokenizer_config=config, override="{{ inline }}").default_text == "{{ inline }}"
    assert load(tmp_path, tokenizer_config=config, override=str(tmp_path / "mine.jinja")).default_text == "mine\n"
    assert load(tmp_path, override=str(tmp_path / "mine.json")).default_text == "mine too"
    assert load(tmp_path, tokenizer_config=config).special_tokens == {"eos_token": "<end>"}


def test_a_tokenizer_config_without_a_template_leaves_the_folder_its_own(tmp_path: Path) -> None:
    write(tmp_path, {"chat_template.jinja": "jinja", "other.json": {}})
    assert ChatTemplates.load(tmp_path, tokenizer_config=tmp_path / "other.json").default_text == "jinja"


def test_a_folder_without_templates_is_fine(tmp_path: Path) -> None:
    templates = ChatTemplates.load(tmp_path)
    assert templates.sources == {}
    assert templates.default_text == ""
    assert templates.choose(tools_given=True) is None
    assert templates.using_tools == frozenset()


@pytest.mark.parametrize(
    "files",
    [
        {
            "tokenizer_config.json": {
                "chat_template": [
                    {"name": "default", "template": "plain"},
                    {"name": "tool_use", "template": "{{ tools }}"},
                ]
            }
        },
        {"chat_template.jinja": "plain", "additional_chat_templates/tool_use.jinja": "{{ tools }}"},
    ],
    ids=["a list", "files"],
)
def test_the_template_for_tools_is_taken_where_tools_are_given(tmp_path: Path, files: Json) -> None:
    templates = ChatTemplates.load(write(tmp_path, files))
    assert templates.choose(tools_given=False) == "default"
    assert templates.choose(tools_given=True) == "tool_use"
    assert templates.using_tools == {"tool_use"}
    assert templates.default_text == "plain"


def test_without_a_default_only_requests_with_tools_have_a_template(tmp_path: Path) -> None:
    write(tmp_path, {"additional_chat_templates/tool_use.jinja": "x", "tokenizer_config.json": {"chat_template": "y"}})
    templates = ChatTemplates.load(tmp_path)
    assert templates.choose(tools_given=False) is None
    assert templates.choose(tools_given=True) == "tool_use"


@pytest.mark.parametrize(
    ("text", "uses"),
    [
        ("{% if tools %}x{% endif %}", True),
        ("{%- for t in tools %}{{ t | tojson }}{% endfor %}", True),
        ("{% if tools is not none and true %}{% endif %}", True),
        ("the tools are {{ messages }}", False),
        ("{{ message.tools }}{{ 'tools' }}{# tools #}", False),
        ("{% set tools = 1 %}", False),
        ("{{ 'a' * 10 ** 10 }}", False),
    ],
)
def test_whether_a_template_reads_tools(tmp_path: Path, text: str, *, uses: bool) -> None:
    templates = ChatTemplates.load(tmp_path, override=text + "{{ '' }}")
    assert ("default" in templates.using_tools) is uses


def test_special_tokens_are_texts_or_objects(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "special_tokens_map.json": {"bos_token": "<old>", "pad_token": {"content": "<pad>"}, "unk_token": "<unk>"},
            "tokenizer_config.json": {
                "bos_token": {"content": "<s>", "lstrip": False},
                "eos_token": "</s>",
                "unk_token": None,
                "mask_token": 7,
                "name": "x",
            },
        },
    )
    assert ChatTemplates.load(tmp_path).special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config.json": "{"}, r"tokenizer_config\.json is not JSON: "),
        ({"tokenizer_config.json": "[1]"}, r"tokenizer_config\.json is not a JSON object"),
        ({"chat_template.json": {"chat_template": 1}}, "chat_template must be a text or a list of objects"),
        ({"chat_template.json": {"chat_template": [{"name": "default"}]}}, "must be a text or a list of objects"),
        ({"chat_template.jinja": "one\n{% for %}"}, "chat template 'default', line 2: "),
        ({"chat_template.jinja": "{{ x | nothing( }}"}, "chat template 'default', line 1: "),
        ({"chat_template.jinja": "{{ " + "(" * 5000 + ")" * 5000 + " }}"}, "'default' is nested too deeply"),
        ({"additional_chat_templates/tool_use.jinja": "{% if %}"}, "chat template 'tool_use', line 1: "),
    ],
)
def test_a_broken_file_is_one_clear_line(tmp_path: Path, files: Json, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message) as caught:
        ChatTemplates.load(write(tmp_path, files))
    assert "\n" not in str(caught.value)


def test_a_template_that_is_never_used_may_be_broken(tmp_path: Path) -> None:
    write(tmp_path, {"chat_template.jinja": "x", "additional_chat_templates/rag.jinja": "{% if %}"})
    assert ChatTemplates.load(tmp_path).choose(tools_given=True) == "default"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ChatTemplateError, match=r"chat_template\.jinja is not UTF-8"):
        ChatTemplates.load(tmp_path)
    with (tmp_path / "chat_template.jinja").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ChatTemplateError, match=r"chat_template\.jinja is larger than 16 MiB"):
        ChatTemplates.load(tmp_path)
    model, template = tmp_path / "model", tmp_path / "model" / "chat_template.jinja"
    model.mkdir()
    template.symlink_to("/etc/passwd")
    with pytest.raises(ChatTemplateError, match=r"'chat_template\.jinja' leads out of the model folder"):
        ChatTemplates.load(model)
    template.unlink()
    template.write_text("{{x}}" * 30_000)
    with pytest.raises(ChatTemplateError, match="chat template 'default' has more than 131072 characters"):
        ChatTemplates.load(model)
    template.write_text("")
    (model / "tokenizer_config.json").write_text(json.dumps({"bos_token": "x" * 2000}))
    with pytest.raises(ChatTemplateError, match=r"tokenizer_config\.json: bos_token has more than 1024 characters"):
        ChatTemplates.load(model)


def test_settings_without_a_template(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="'nowhere' is neither a file nor a template"):
        ChatTemplates.load(tmp_path, override="nowhere")
    with pytest.raises(ChatTemplateError, match=r"there is no file .*nothing\.json"):
        ChatTemplates.load(tmp_path, tokenizer_config=tmp_path / "nothing.json")
    write(tmp_path, {"mine.json": {}})
    with pytest.raises(ChatTemplateError, match=r"mine\.json has no chat_template"):
        ChatTemplates.load(tmp_path, override=str(tmp_path / "mine.json"))
