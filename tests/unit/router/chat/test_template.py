"""Templates in their workers: prompts, and hostile templates. Others: tests/unit/router/sandbox."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from text_generation_router.chat.conversation import Conversation, Json, Tool
from text_generation_router.chat.template import TemplateRenderer
from text_generation_router.chat.template_files import ChatTemplateError, ChatTemplates
from text_generation_router.errors import InvalidRequest, TemplateError
from text_generation_router.request import DEFAULT_TENANT

LONG_TIMEOUT_S = 60.0
SHORT_TIMEOUT_S = 0.5


def says(text: str, **more: object) -> Conversation:
    return Conversation([{"role": "user", "content": text, **more}])


def a_renderer(template: str, *, timeout_s: float = LONG_TIMEOUT_S) -> TemplateRenderer:
    templates = ChatTemplates.load(Path("nowhere"), override=template + "\n")
    return TemplateRenderer(templates, workers=1, timeout_s=timeout_s)


async def refusal(template: str, *, timeout_s: float = LONG_TIMEOUT_S) -> str:
    async with a_renderer(template, timeout_s=timeout_s) as renderer:
        await renderer.ready()
        with pytest.raises(TemplateError) as caught:
            await renderer.render(says("Hello"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("asked", "content", "prompt"),
    [
        (None, "Once upon ", "user:Hello;assistant:Once upon"),
        (True, "Once upon ", "user:Hello;assistant:Once upon "),
        (False, "Once upon ", "user:Hello;assistant:Once upon ;assistant:"),
        (None, "Hello", "user:Hello;assistant:Hello"),
        (None, "", "user:Hello;assistant:"),
    ],
)
async def test_the_final_message_is_continued(asked: bool | None, content: str, prompt: str) -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    messages: list[Json] = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": content}]
    async with a_renderer(template) as renderer:
        assert await renderer.render(Conversation(messages, continue_final_message=asked)) == prompt


async def test_a_final_message_that_is_not_shown_cannot_be_continued() -> None:
    async with a_renderer("{{ messages[0].content }}") as renderer:
        messages: list[Json] = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
        with pytest.raises(TemplateError, match="the template does not show the final message"):
            await renderer.render(Conversation(messages))


@pytest.mark.parametrize(
    ("template", "length", "limit"),
    [
        ("{{ ('a' * 2500) * 1000 }}", 1, "2000000 characters as a text"),
        ("{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}", 1, "2000000 characters as a text"),
        ("{{ messages[0].content }}", 2_000_001, "2000000 characters as a text"),
        ("{{ messages[0].content }}", 8_000_000, "8000000 bytes as JSON"),
    ],
)
async def test_a_conversation_that_is_too_long_is_refused_with_the_limit(
    template: str, length: int, limit: str
) -> None:
    async with a_renderer(template) as renderer:
        with pytest.raises(
            InvalidRequest, match=f"prompt is too long: messages and tools .* at most {limit}$"
        ) as caught:
            await renderer.render(says("a" * length))
    assert caught.value.code == "context_length_exceeded"


async def test_a_folder_without_a_template_starts_and_refuses(tmp_path: Path) -> None:
    async with TemplateRenderer(ChatTemplates.load(tmp_path)) as renderer:
        with pytest.raises(TemplateError, match=r"^Template error: template not found$"):
            await renderer.render(says("Hello"))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no\n way') }}", "no way"),
        ("{{ messages.nothing.at_all }}", "'list object' has no attribute 'nothing'"),
        ("{{ 'a' + none }}", 'can only concatenate str (not "NoneType") to str'),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe."),
        ("{% set ns = namespace(x=1) %}{% set ns.__init__ = 1 %}", "a namespace cannot have an attribute '__init__'"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe."),
        ("{{ range(100001) | list }}", "Range too big. The sandbox blocks ranges larger than MAX_RANGE (100000)."),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "the template recurses too deeply"),
        ("{{ 'a' * 10 ** 10 }}", "the template needs too much memory"),
        ("{{ '\\ud800' }}", "the text is not valid Unicode"),
        ("{% include 'passwd' %}", "no loader for this environment specified"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages | nofilter }}", "No filter named 'nofilter'."),
    ],
)
async def test_a_bad_template_is_a_clear_error(template: str, message: str) -> None:
    try:
        assert await refusal(template) == f"Template error: {message}"
    except ChatTemplateError as error:  # found at the start
        assert message in str(error)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set x = 7 ** (messages | length * 10 ** 8) %}",
    ],
)
async def test_a_template_that_never_ends_is_killed(template: str) -> None:
    assert await refusal(template, timeout_s=SHORT_TIMEOUT_S) == "Template error: the template took too long"


async def test_arguments_of_the_template() -> None:
    async with a_renderer("{{ enable_thinking }} {{ self }} {{ documents is none }}") as renderer:
        conversation = Conversation(
            [{"role": "user", "content": ""}], template_kwargs={"enable_thinking": 1, "args": 2}
        )
        assert (await renderer.render(conversation)).startswith("1 ")


async def test_arguments_are_an_object_and_json_where_a_template_joins_them_with_text() -> None:
    template = (
        "{% set call = messages[1].tool_calls[0].function %}{{ call.arguments.a + 1 }} {{ 'f' + call.arguments + '!' }}"
    )
    calls = [{"function": {"name": "f", "arguments": {"a": 1, "b": "é"}}}]
    conversation = Conversation([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls}])
    async with a_renderer(template) as renderer:
        assert await renderer.render(conversation) == '2 f{"a": 1, "b": "é"}!'


@pytest.mark.parametrize("name", ["chatml", "gemma", "llama3", "mistral", "qwen3"])
async def test_the_next_turn_repeats_the_prompt_but_for_its_ending(name: str) -> None:
    messages: list[Json] = [{"role": "user", "content": "Hello"}]
    answer: Json = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nHi"}
    async with a_renderer((Path(__file__).parent / f"templates/{name}.jinja").read_text()) as renderer:
        for thinks in (True, False):
            given = {"enable_thinking": thinks, "bos_token": "<s>", "eos_token": "</s>"}
            first = Conversation(messages, template_kwargs=given)
            prompt = await renderer.render(first)
            (ending,) = await renderer.unrepeated_endings(first, prompt, DEFAULT_TENANT)
            assert ending == ("" if name != "qwen3" or thinks else "<think>\n\n</think>\n\n")
            assert prompt.endswith(ending)
            turns = [*messages, answer, {"role": "user", "content": "And?"}]
            later = await renderer.render(Conversation(turns, template_kwargs=given))
            assert later.startswith(prompt.removesuffix(ending))


async def test_a_further_question_drops_the_reasoning_before_a_call() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {}}}
    called: list[Json] = [
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "Ah.", "tool_call_id": "1"},
    ]
    async with a_renderer((Path(__file__).parent / "templates/qwen3.jinja").read_text()) as renderer:
        question = Conversation([{"role": "user", "content": "Hello"}], tools=[Tool("look")])
        before = await renderer.render(question)
        first, second = (replace(question, messages=[*question.messages, *called * count]) for count in (1, 2))
        prompt = await renderer.render(first)
        # The next prompt has <tool_call> in the place of <think>.
        assert await renderer.unrepeated_endings(first, prompt, DEFAULT_TENANT) == {
            "",
            prompt.removeprefix(f"{before}<t"),
        }
        # Later calls are not rendered again: the checkpoint is there.
        assert await renderer.unrepeated_endings(second, await renderer.render(second), DEFAULT_TENANT) == {""}


async def test_of_a_template_that_refuses_a_short_conversation_no_ending_is_known() -> None:
    async with a_renderer("{{ raise_exception('no') if messages | length < 2 else messages[1].content }}") as renderer:
        assert await renderer.unrepeated_endings(says("Hello"), "", DEFAULT_TENANT) == set()


async def test_a_chat_that_takes_too_long_leaves_the_ending_of_others_known() -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = "{% if messages[0].content == 'slow' %}" + loop + "{% endif %}{{ '<think>' if messages | length == 2 }}"
    async with a_renderer(template, timeout_s=SHORT_TIMEOUT_S) as renderer:
        for content, endings in (("slow", set[str]()), ("Be brief.", {"<think>"})):
            chat = replace(says("Hello"), messages=[{"role": "system", "content": content}, *says("Hello").messages])
            assert await renderer.unrepeated_endings(chat, "<think>", DEFAULT_TENANT) == endings
