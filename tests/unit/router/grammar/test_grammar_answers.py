"""Grammars of answers that call tools in the model's format, or follow a schema: the texts that they allow."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from json_call_answers import BROOKLYN, TOOLS
from llguidance import LLTokenizer
from model_answers import HARMONY_LOOK, TABLES, V3_LOOK, V31_LOOK
from tokenizers import Tokenizer

from text_generation_common.grammar_tokenizer import compiled, load_tokenizer
from text_generation_proto.values import Grammar
from text_generation_router.chat.conversation import Tool
from text_generation_router.chat.parsers import FORMATS
from text_generation_router.chat.parsers.base import CallParser
from text_generation_router.chat.parsers.syntax import Pieces, Repeat, Slot, Until
from text_generation_router.errors import ToolError
from text_generation_router.grammar.forms import ebnf_grammar, regex_grammar, schema_grammar
from text_generation_router.grammar.proof import prove
from text_generation_router.grammar.tools import calls_or_answer

ANSWER = '{"ok": true}'
LLAMA = '{"name": "get_weather", "parameters": ' + BROOKLYN + "}"
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    f"{BROOKLYN}<|tool_call_end|><|tool_call_begin|>functions.stop:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)
GEMMA = '<|tool_call>call:get_weather{location:<|"|>Brooklyn, NY<|"|>}<tool_call|>'
FORMATS_WITH_CALLS = [name for name, form in FORMATS.items() if form.calls]


def table(name: str, *cases: str) -> list[str]:
    return [TABLES[name][case][0].strip("\n") for case in cases]


CALLS: dict[str, list[str]] = {name: table(name, "one") for name in FORMATS_WITH_CALLS if "one" in TABLES[name]} | {
    "openai": [HARMONY_LOOK.removesuffix("<|call|>"), *(
        text.removesuffix("<|call|>") for text in table("openai", "recipient before the channel", "call"))],
    "gemma4": [GEMMA, *table("gemma4", "every type", "reasoning"), f"{GEMMA}\n{GEMMA}"],
    "deepseek_v3": [*table("deepseek_v3", "V3", "V3.1"),
                    f"<｜tool▁calls▁begin｜>{V31_LOOK}{V31_LOOK}<｜tool▁calls▁end｜>",
                    f"<｜tool▁calls▁begin｜>{V3_LOOK}\n{V3_LOOK}<｜tool▁calls▁end｜>"],
    "kimi_k2": [KIMI],
    "glm45": table("glm45", "one", "newer, without newlines", "types", "no arguments"),
    "minimax_m2": [*table("minimax_m2", "one"), table("minimax_m2", "two in a block")[0].removeprefix("Yes.")],
    "minimax_m3": table("minimax_m3", "one", "types", "an array and objects"),
    "cohere_command": table("cohere_command", "one", "two"),
    "qwen3_coder": table("qwen3_coder", "one", "two", "every type", "on one line"),
    "hermes": table("hermes", "one", "two"),
    "mistral": table("mistral", "array", "newer", "newer, two", "newer, with an id", "newer, without a marker"),
    "llama4_pythonic": table("llama4_pythonic", "one", "two, tagged", "escapes"),
    "llama3_json": [*table("llama3_json", "one", "tagged"), f"{LLAMA}; {LLAMA}"],
    "json": [*table("json", "bare"), LLAMA],
}  # fmt: skip
"""Answers of the models that are calls alone; some after reasoning in a channel."""


@dataclass(frozen=True)
class Model:
    """A tokenizer with the markers of all formats, as special tokens."""

    words: Tokenizer
    tokenizer: LLTokenizer
    special: dict[str, int]

    def allows(self, grammar: Grammar, text: str) -> bool:
        matcher = compiled(grammar, self.tokenizer)
        assert not matcher.is_error(), matcher.get_error()
        return bool(
            matcher.consume_tokens(self.words.encode(text, add_special_tokens=False).ids) and matcher.is_accepting()
        )


@pytest.fixture(scope="module", params=[True, False], ids=["special markers", "markers as text"])
def model(request: pytest.FixtureRequest, demo_model: Path) -> Model:
    document = json.loads((demo_model / "tokenizer.json").read_text(encoding="utf-8"))
    parsers = [FORMATS[name].parser for name in FORMATS_WITH_CALLS]
    markers = {
        text
        for parser in parsers
        if isinstance(parser, type) and issubclass(parser, CallParser)
        for text in parser.SPECIAL
    }
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    document["added_tokens"] += [
        {"id": len(document["model"]["vocab"]) + number, "content": text, "special": True, **flags}
        for number, text in enumerate(sorted(markers) if request.param else ())
    ]
    text = json.dumps(document)
    words = Tokenizer.from_str(text)
    special = {token.content: number for number, token in words.get_added_tokens_decoder().items()}
    return Model(words, load_tokenizer(text), special)


def tools(*, strict: bool = False) -> list[Tool]:
    return [Tool(name, None, parameters, strict=strict) for name, parameters in TOOLS.items()]


def schema() -> Grammar:
    return schema_grammar({"properties": {"ok": {"type": "boolean"}}, "required": ["ok"]})


def grammar_of(
    name: str, model: Model, *, strict: bool = False, before: Pieces | None = None, one: bool = False
) -> Grammar:
    form = FORMATS[name]
    thought = ((Repeat(form.thought),) if form.thought else ()) if before is None else before
    return calls_or_answer(
        tools(strict=strict), form.calls, schema(), model.special,
        before=thought, answer_start=form.answer_start, one_call=one,
    )  # fmt: skip


@pytest.mark.parametrize("name", FORMATS_WITH_CALLS)
def test_an_answer_calls_tools_in_the_models_format_or_follows_the_schema(name: str, model: Model) -> None:
    start = FORMATS[name].answer_start
    grammar = grammar_of(name, model)
    prove(grammar, model.tokenizer)
    assert [text for text in (start + ANSWER, *CALLS[name]) if not model.allows(grammar, text)] == []
    unknown = [text.replace("get_weather", "rm").replace("search", "rm") for text in CALLS[name]]
    wrong = ["Hello", start + '{"ok": 1}', start, f"{start}{ANSWER} {CALLS[name][0]}", *set(unknown) - set(CALLS[name])]
    assert [text for text in wrong if model.allows(grammar, text)] == []


def test_arguments_of_strict_tools_follow_their_schemas_and_one_call_is_one(model: Model) -> None:
    for name in ("hermes", "llama3_json", "mistral", "deepseek_v3", "kimi_k2", "openai"):
        wrong = CALLS[name][0].replace('"celsius"', '"kelvin"')
        assert wrong != CALLS[name][0]
        assert model.allows(grammar_of(name, model), wrong), name
        assert not model.allows(grammar_of(name, model, strict=True), wrong), name
        assert model.allows(grammar_of(name, model, strict=True), CALLS[name][0]), name
    for name, two in (("hermes", "two"), ("qwen3_coder", "two"), ("mistral", "newer, two")):
        [text] = table(name, two)
        assert not model.allows(grammar_of(name, model, one=True), text), name


def test_reasoning_may_or_must_come_first(model: Model) -> None:
    rest = (Until("</think>"), Slot.GAP)
    optional = grammar_of("hermes", model, before=(Repeat(("<think>", *rest)),))
    begun = grammar_of("hermes", model, before=rest)
    for text in (ANSWER, CALLS["hermes"][0]):
        assert model.allows(optional, text)
        assert model.allows(optional, f"<think>So.</think>\n\n{text}")
        assert model.allows(begun, f"So.\n</think>\n\n{text}")
        assert not model.allows(begun, text)


def test_an_expression_is_an_answer_too_and_rules_are_not(model: Model) -> None:
    either: Callable[[Grammar], Grammar] = lambda answer: calls_or_answer(  # noqa: E731
        tools(), FORMATS["hermes"].calls, answer, model.special
    )
    grammar = either(regex_grammar("yes/no|maybe"))
    for text in ("yes/no", "maybe", CALLS["hermes"][0]):
        assert model.allows(grammar, text)
    assert not model.allows(grammar, "no")
    with pytest.raises(ToolError, match="Grammar and tools are mutually exclusive"):
        either(ebnf_grammar("root ::= 'a'"))
