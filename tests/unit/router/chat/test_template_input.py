"""The variables of a template, and the text about tools for templates that do not know them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from text_generation_router.chat.conversation import Conversation, Json, Tool, image_part, join_parts, text_part
from text_generation_router.chat.template import DEFAULT_TOOL_PROMPT, TemplateRenderer, plain_message, template_input
from text_generation_router.chat.template_files import ChatTemplates
from text_generation_router.errors import InvalidRequest, TemplateError

PLAIN = ChatTemplates({"default": "plain"}, {"bos_token": "<s>"}, frozenset())
WITH_TOOLS = ChatTemplates({"default": "tools"}, {"bos_token": "<s>"}, frozenset({"default"}))
ADD = Tool("add", "Adds.", {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "integer"}}})
NOW = Tool("now")
HELLO: Json = {"role": "user", "content": "Hello"}
HI: Json = {"role": "assistant", "content": "Hi"}
CALL: Json = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "now", "arguments": {}}}]}

ADD_FOR_TGI = (
    '{"type":"function","function":{"description":"Adds.","name":"add","arguments":'
    '"{\\"type\\":\\"object\\",\\"properties\\":{\\"z\\":{\\"type\\":\\"integer\\"},\\"a\\":{\\"type\\":\\"integer\\"}}}"}}'
)
NOW_FOR_TGI = '{"type":"function","function":{"description":null,"name":"now","arguments":"{}"}}'


def variables(conversation: Conversation, templates: ChatTemplates = PLAIN) -> Any:  # noqa: ANN401 - as in JSON
    return json.loads(template_input(conversation, templates)[0])["variables"]


def test_all_variables_of_a_template() -> None:
    assert variables(Conversation([HELLO], template_kwargs={"enable_thinking": False})) == {
        "documents": None,
        "bos_token": "<s>",
        "enable_thinking": False,
        "messages": [HELLO],
        "tools": None,
        "add_generation_prompt": True,
    }


def test_tools_as_templates_know_them() -> None:
    assert variables(Conversation([HELLO], [ADD, NOW]), WITH_TOOLS)["tools"] == [
        {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD.parameters}},
        {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
    ]


def test_a_template_that_reads_descriptions_gets_one_of_each_tool() -> None:
    reading = ChatTemplates({"default": "{{ tool.description }}"}, {}, frozenset({"default"}))
    described = [
        tool["function"]["description"] for tool in variables(Conversation([HELLO], [ADD, NOW]), reading)["tools"]
    ]
    assert described == ["Adds.", ""]


def test_harmonys_template_gets_one_text_before_calls() -> None:
    harmony = ChatTemplates({"default": "<|channel|>"}, {}, frozenset({"default"}))
    messages = [HELLO, CALL | {"content": "I look.", "reasoning_content": "Hm."}, HI | {"reasoning": "Hm."}]
    given = variables(Conversation(messages, [NOW], continue_final_message=False), harmony)
    assert [(message["content"], message.get("thinking")) for message in given["messages"]] == [
        ("Hello", None),
        ("", "Hm.\nI look."),
        ("Hi", "Hm."),
    ]


def test_a_template_that_knows_tools_gets_no_text_about_them() -> None:
    assert variables(Conversation([HELLO], [ADD]), WITH_TOOLS)["messages"] == [HELLO]
    asked = variables(Conversation([HELLO], [ADD], tool_prompt="Use them."), WITH_TOOLS)
    assert asked["messages"][0]["content"] == "Hello\n---\nUse them."


def test_tools_are_appended_to_the_users_first_message_if_the_template_knows_none() -> None:
    """So they stay where they are in the next turn, whose prompt begins with this one."""
    system = {"role": "system", "content": "Be brief."}
    given = variables(Conversation([system, HELLO, HI, HELLO], [ADD, NOW]))
    assert given["tools"] is None
    assert given["messages"][0] == system
    assert given["messages"][1]["content"] == f"Hello\n---\n[{ADD_FOR_TGI},{NOW_FOR_TGI}]\n{DEFAULT_TOOL_PROMPT}"
    assert given["messages"][2:] == [HI, HELLO]
    without_user = variables(Conversation([system, HI], [ADD], continue_final_message=False))["messages"]
    assert without_user[0] == system
    assert without_user[1]["content"].startswith(f"Hi\n---\n[{ADD_FOR_TGI}]\n")
    assert HELLO["content"] == "Hello", "the conversation itself stays as it was"


@pytest.mark.parametrize(("prompt", "said"), [("Use them.", "Use them."), ("", DEFAULT_TOOL_PROMPT)])
def test_the_tool_prompt_of_a_request(prompt: str, said: str) -> None:
    given = variables(Conversation([HELLO], [NOW], tool_prompt=prompt))
    assert given["messages"][0]["content"] == f"Hello\n---\n[{NOW_FOR_TGI}]\n{said}"


def test_a_message_without_text_and_one_to_be_continued_are_not_edited() -> None:
    after_call = variables(Conversation([HELLO, CALL], [NOW]))["messages"]
    assert after_call[0]["content"].startswith("Hello\n---\n")
    assert "content" not in after_call[1]
    continued = variables(Conversation([HELLO, HI], [NOW]))["messages"]
    assert continued[0]["content"].startswith("Hello\n---\n")
    assert continued[1] == HI


@pytest.mark.parametrize(
    ("messages", "asked", "continues", "trims"),
    [
        ([HELLO], None, False, False),
        ([HELLO, HI], None, True, True),
        ([HELLO, HI], True, True, False),
        ([HELLO, HI], False, False, False),
        ([HELLO], True, True, False),
        ([HELLO, CALL], None, False, False),
        ([HELLO, {**CALL, "content": "Let me see"}], None, False, False),
        ([HELLO, {"role": "assistant", "content": "Hi", "tool_calls": []}], None, True, True),
    ],
)
def test_when_the_last_message_is_continued(
    messages: list[Json], asked: bool | None, continues: bool, trims: bool
) -> None:
    payload, trim = template_input(Conversation(messages, continue_final_message=asked), PLAIN)
    request = json.loads(payload)
    assert request["continue_final"] is continues
    assert trim is trims
    assert request["variables"]["add_generation_prompt"] is not continues


def test_a_message_as_transformers_passes_it() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert plain_message({"role": "user", "content": parts, "name": None}) == {"role": "user", "content": "one two"}
    thought = plain_message({"role": "assistant", "content": "x", "reasoning": "hm"})
    assert thought["reasoning_content"] == thought["thinking"] == "hm"


@pytest.mark.parametrize(
    ("conversation", "error", "message"),
    [
        (Conversation([CALL], continue_final_message=True), TemplateError, "has no content that could be continued"),
        (Conversation([HELLO | {"content": [{"type": "image_url"}]}]), TemplateError, "only text parts are supported in messages"),
        (Conversation([HELLO | {"content": "\ud800"}]), TemplateError, "cannot be passed to the template"),
        (Conversation([HELLO], template_kwargs={"n": 1 << 70}), TemplateError, "cannot be passed to the template"),
        (Conversation([]), InvalidRequest, "^Input validation error: `messages` cannot be empty$"),
        *((Conversation([HELLO], template_kwargs={name: []}), InvalidRequest, f"`chat_template_kwargs` must not set `{name}`")
          for name in ("messages", "tools", "add_generation_prompt", "continue_final_message")),
    ],
)  # fmt: skip
def test_what_cannot_be_a_prompt(conversation: Conversation, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        variables(conversation)


IMAGE = image_part("data:image/png;base64,AAAA")
PICTURE: Json = {"role": "user", "content": ["Look", IMAGE, "at it"]}


def test_a_template_gets_images_in_their_places_without_their_data() -> None:
    message = PICTURE | {"content": join_parts(PICTURE["content"])}
    [given] = variables(Conversation([message], [NOW]))["messages"]
    assert [part["type"] for part in given["content"]] == ["text", "image", "text"]
    assert given["content"][1] == {"type": "image"}
    assert given["content"][2]["text"].startswith("at it\n---\n[")  # the text about the tools
    assert Conversation([HELLO, message, HI, message]).images == [IMAGE["image"]] * 2


def test_texts_that_follow_each_other_are_one_part_and_alone_no_part() -> None:
    assert join_parts(["a", "b"], "\n") == "a\nb"
    assert join_parts([]) == ""
    assert join_parts(["a", "b", IMAGE, "c"], "-") == [text_part("a-b"), IMAGE, text_part("c")]


@pytest.mark.parametrize(
    ("template", "reads"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for p in m['content'] | list %}{{ p['text'] }}{% endfor %}{% endfor %}", True),
        (
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
            "{{ p.text }}{% endfor %}{% endif %}{% endfor %}",
            False,
        ),
    ],
)
async def test_a_template_that_reads_parts_gets_texts_as_parts(template: str, reads: bool, tmp_path: Path) -> None:
    templates = ChatTemplates.load(tmp_path, override=template)
    assert (variables(Conversation([HELLO]), templates)["messages"][0]["content"] != "Hello") == reads
    async with TemplateRenderer(templates, workers=1) as renderer:
        assert await renderer.render(Conversation([HELLO])) == "Hello"
        assert await renderer.render(Conversation([HELLO, HI])) == "HelloHi"  # it is continued


def called_twice(*ids: str) -> list[Json]:
    """Two turns, each with the calls `ids` and their results."""
    calls = [{"id": each, "type": "function", "function": {"name": "now", "arguments": {}}} for each in ids]
    results = [{"role": "tool", "content": "12:00", "tool_call_id": each} for each in ids]
    return [HELLO, {"role": "assistant", "tool_calls": calls}, *results] * 2


@pytest.mark.parametrize(
    ("source", "first", "second"),
    [
        ("[TOOL_CALLS]", ["123456789", "00000tool"], ["123456789", "00000tool"]),
        (
            "<|tool_calls_section_begin|>",
            ["functions.now:0", "functions.now:1"],
            ["functions.now:2", "functions.now:3"],
        ),
        ("<tool_call>", ["call_0123456789", "to-ol"], ["call_0123456789", "to-ol"]),
    ],
)
def test_calls_have_the_ids_that_the_template_asks_for(source: str, first: list[str], second: list[str]) -> None:
    templates = ChatTemplates({"default": source}, {}, frozenset({"default"}))
    messages = variables(Conversation(called_twice("call_0123456789", "to-ol"), [NOW]), templates)["messages"]
    assert [call["id"] for message in messages for call in message.get("tool_calls", ())] == first + second
    assert [message["tool_call_id"] for message in messages if message["role"] == "tool"] == first + second
