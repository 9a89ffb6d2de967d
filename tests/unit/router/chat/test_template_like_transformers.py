"""The rendered text equals that of transformers, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import pytest
from full_grid import full
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from text_generation_router.chat.conversation import Conversation, Json, Tool
from text_generation_router.chat.template import template_input, template_tool
from text_generation_router.chat.template_files import ChatTemplates
from text_generation_router.chat.template_job import RenderError, renderer

HERE = Path(__file__).parent
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
TEMPLATES = sorted(path.stem for path in (HERE / "templates").glob("*.jinja"))

WEATHER = Tool(
    "get_weather",
    "The weather – now & here <b>",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Köln", "Zürich"]},
            "days": {"type": "integer", "default": 1.5},
        },
        "required": ["city"],
    },
)
CLOCK = Tool("clock")

CALL: Json = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln"}}}
    ],
}
CONVERSATIONS: dict[str, list[Json]] = {
    "user": [{"role": "user", "content": "Hello"}],
    "blanks": [{"role": "user", "content": "  two\n\n  lines \n"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße 🦙 <&> {{ 7 * 7 }}"}],
    "turns": [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": " one "},
        {"role": "user", "content": "2", "name": "Ada"},
    ],
    "thoughts": [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\none"},
        {"role": "user", "content": "2"},
        {"role": "assistant", "content": "two", "reasoning": "well"},
    ],
    "calls": [
        {"role": "user", "content": "Weather?"},
        CALL,
        {"role": "tool", "content": '{"degrees": 21}', "tool_call_id": "abcdefghi"},
    ],
    "two calls": [
        {"role": "user", "content": "Weather?"},
        {**CALL, "content": "Let me see.", "tool_calls": CALL["tool_calls"] * 2},
        {"role": "tool", "content": "21", "tool_call_id": "abcdefghi"},
        {"role": "tool", "content": "22", "tool_call_id": "abcdefghi"},
    ],
    "assistant first": [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Hi"}],
    "odd": [{"role": "user", "content": "1"}, {"role": "critic", "content": "2"}],
}


def ours(templates: ChatTemplates, conversation: Conversation) -> str:
    payload, _ = template_input(conversation, templates)
    job = renderer({"sources": dict(templates.sources), "max_characters": 100_000})()
    return job(payload).decode()


def theirs(template: str, messages: list[Json], **settings: Any) -> str:  # noqa: ANN401 - theirs
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()), chat_template=template, **SPECIAL_TOKENS)
    text = tokenizer.apply_chat_template(messages, tokenize=False, **settings)
    assert isinstance(text, str)
    return text


def of(text: str) -> ChatTemplates:
    templates = ChatTemplates.load(HERE, override=text)
    return replace(templates, special_tokens=SPECIAL_TOKENS)


def text_or_refusal(render: Callable[[], str]) -> str:
    """Return the text, or the reason why there is none."""
    try:
        return render()
    except (RenderError, jinja2.TemplateError) as error:
        return f"refused: {error}"


@pytest.mark.parametrize("tools", [(), full((WEATHER,)), (WEATHER, CLOCK)], ids=["no tools", "a tool", "two tools"])
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_new_turn(name: str, messages: list[Json], tools: tuple[Tool, ...]) -> None:
    text = (HERE / "templates" / f"{name}.jinja").read_text()
    templates = of(text)
    tools = tools if templates.choose(tools_given=True) in templates.using_tools else ()
    for prompt, kwargs in [
        (True, {}),
        (False, {"enable_thinking": False, "date_string": "1 May", "tools_in_user_message": False}),
    ]:
        conversation = Conversation(
            messages, tools, continue_final_message=False, add_generation_prompt=prompt, template_kwargs=kwargs
        )
        expected = text_or_refusal(
            lambda prompt=prompt, kwargs=kwargs: theirs(  # type: ignore[misc]
                text, messages, tools=[template_tool(t) for t in tools] or None, add_generation_prompt=prompt, **kwargs
            )
        )
        assert text_or_refusal(lambda conversation=conversation: ours(templates, conversation)) == expected  # type: ignore[misc]


@pytest.mark.parametrize("final", ["The answer", "The answer is ", " \n The\nanswer\n\n", "", "Hello"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_turn_to_be_continued(name: str, final: str) -> None:
    text = (HERE / "templates" / f"{name}.jinja").read_text()
    messages: list[Json] = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": final}]
    conversation = Conversation(messages, continue_final_message=True)
    rendered = ours(of(text), conversation)
    assert "Hello" in rendered
    assert rendered == theirs(text, messages, continue_final_message=True)


def test_the_demo_model(demo_model: Path) -> None:
    templates = ChatTemplates.load(demo_model)
    reference = PreTrainedTokenizerFast.from_pretrained(demo_model)
    messages: list[Json] = [{"role": "user", "content": "Hello"}]
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours(templates, Conversation(messages)) == expected
    assert templates.special_tokens["eos_token"] == reference.eos_token
