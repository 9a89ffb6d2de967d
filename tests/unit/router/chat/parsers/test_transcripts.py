"""Answers of models in each format and their events: fed whole, and a character at a time."""

from __future__ import annotations

import pytest

from text_generation_router.chat.events import Event, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from text_generation_router.chat.parsers import ReasoningParser, create_parser

TOOLS = ("get_weather", "search", "stop")
BROOKLYN = '{"location": "Brooklyn, NY", "unit": "celsius"}'


def parsed(parser_name: str, pieces: list[str], reasoning: str) -> list[Event]:
    """Return the events, adjacent ones of a kind joined."""
    parser = create_parser(parser_name, tool_names=TOOLS)
    if reasoning:
        parser = ReasoningParser(parser, starts_inside=reasoning == "inside")
    events = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish()
    joined: list[Event] = []
    for event in events:
        match joined[-1] if joined else None, event:
            case (TextDelta(before), TextDelta(text)):
                joined[-1] = TextDelta(before + text)
            case (ReasoningDelta(before), ReasoningDelta(text)):
                joined[-1] = ReasoningDelta(before + text)
            case (ToolCallArguments(index, before), ToolCallArguments(again, text)) if index == again:
                joined[-1] = ToolCallArguments(index, before + text)
            case _:
                joined.append(event)
    return joined


def call(index: int, name: str, arguments: str) -> list[Event]:
    return [ToolCallStart(index, name), ToolCallArguments(index, arguments)]


def text(said: str) -> list[Event]:
    return [TextDelta(said)]


def thought(said: str) -> list[Event]:
    return [ReasoningDelta(said)]


WEATHER = '{"name": "get_weather", "arguments": ' + BROOKLYN + "}"
DEEP = '{"a":' * 70 + "1" + "}" * 70
HERMES: dict[str, tuple[str, list[Event]]] = {
    "one": (f"<tool_call>\n{WEATHER}\n</tool_call>", call(0, "get_weather", BROOKLYN)),
    "text before and after": (
        f"Let me look.\n<tool_call>\n{WEATHER}\n</tool_call>\nDone.",
        [*text("Let me look.\n"), *call(0, "get_weather", BROOKLYN), *text("\nDone.")],
    ),
    "two": (
        f'\n<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{{"name": "stop", "arguments": {{}}}}\n</tool_call>\n',
        [*call(0, "get_weather", BROOKLYN), *call(1, "stop", "{}")],
    ),
    "arguments first": (
        '<tool_call>{"arguments": { "q" : [1, -2.5e+3, null] }, "name": "search"}</tool_call>',
        call(0, "search", '{ "q" : [1, -2.5e+3, null] }'),
    ),
    "a string of JSON": (
        r'<tool_call>{"name":"search","arguments":"{\"q\": \"a\\nb \u00e9 \ud83d\ude00 {\"}"}</tool_call>',
        call(0, "search", r'{"q": "a\nb é \ud83d\ude00 {"}'),
    ),
    "an empty string": ('<tool_call>{"name":"stop","arguments":""}</tool_call>', call(0, "stop", "{}")),
    "null": ('<tool_call>{"name":"stop","arguments":null}</tool_call>', call(0, "stop", "{}")),
    "no arguments": ('<tool_call>{"name":"stop"}</tool_call>', call(0, "stop", "{}")),
    "other keys": (
        '<tool_call>{"type":"function","id":{"name":"x","n":[1.5]},"name":"stop","arguments":{},"z":0}</tool_call>',
        call(0, "stop", "{}"),
    ),
    "markers in a string": (
        '<tool_call>{"name":"search","arguments":{"q":"</tool_call> } <tool_call>{"}}</tool_call>',
        call(0, "search", '{"q":"</tool_call> } <tool_call>{"}'),
    ),
    "a bare newline in a string": (
        '<tool_call>{"name":"search","arguments":{"q":"a\nb\tc"}}</tool_call>',
        call(0, "search", r'{"q":"a\nb\tc"}'),
    ),
    "no end tag": (f"<tool_call>{WEATHER}", call(0, "get_weather", BROOKLYN)),
    "no end tag, then another": (
        f"<tool_call>{WEATHER}\n<tool_call>{WEATHER}",
        [*call(0, "get_weather", BROOKLYN), *call(1, "get_weather", BROOKLYN)],
    ),
    "a brace short": (f"<tool_call>{WEATHER[:-1]}\n</tool_call>", call(0, "get_weather", BROOKLYN)),
    "a brace too many": (f"<tool_call>{WEATHER}}}</tool_call>", [*call(0, "get_weather", BROOKLYN), *text("}")]),
    "unknown tool": (
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        text('<tool_call>{"name": "rm", "arguments": {}}</tool_call>'),
    ),
    "no JSON": ("<tool_call>\nsearch(q=1)\n</tool_call>", text("<tool_call>\nsearch(q=1)\n</tool_call>")),
    "an opening too many": (
        f"<tool_call><tool_call>{WEATHER}",
        [*text("<tool_call>"), *call(0, "get_weather", BROOKLYN)],
    ),
    "a number for a name": ('<tool_call>{"name": 5}', text('<tool_call>{"name": 5}')),
    "a list of arguments, before the name": (
        '<tool_call>{"arguments": [1], "name": "stop"}</tool_call>',
        text('<tool_call>{"arguments": [1], "name": "stop"}</tool_call>'),
    ),
    "a list of arguments, after the name": (
        '<tool_call>{"name": "stop", "arguments": [1]}</tool_call>',
        call(0, "stop", "[1]}"),
    ),
    "a word for arguments": ('<tool_call>{"name": "stop", "arguments": "now"}</tool_call>', call(0, "stop", '"now"}')),
    "broken arguments": (
        '<tool_call>{"name": "search", "arguments": {"q": oops}}</tool_call> ok',
        [*call(0, "search", '{"q": oops}}'), *text(" ok")],
    ),
    "the name is all": ('<tool_call>{"name": "stop"</tool_call>', call(0, "stop", "{}")),
    "too deep before the name": (
        f'<tool_call>{{"arguments": {DEEP}, "name": "search"}}',
        text(f'<tool_call>{{"arguments": {DEEP}, "name": "search"}}'),
    ),
    "too deep after the name": (
        f'<tool_call>{{"name": "search", "arguments": {DEEP}}}</tool_call>',
        call(0, "search", DEEP + "}"),
    ),
    "a long name": ('<tool_call>{"name": "' + "x" * 300, text('<tool_call>{"name": "' + "x" * 300)),
    "cut in the name": ('<tool_call>{"name": "sea', text('<tool_call>{"name": "sea')),
    "cut in the arguments": ('<tool_call>{"name": "search", "arguments": {"q": "a', call(0, "search", '{"q": "a')),
    "cut in the marker": ("so <tool_c", text("so <tool_c")),
    "cut in the end tag": (f"<tool_call>{WEATHER}</tool_", [*call(0, "get_weather", BROOKLYN), *text("</tool_")]),
    "only whitespace": (" \n ", text(" \n ")),
    "a stray end tag": ("a </tool_call> b", text("a </tool_call> b")),
}
PARAMETERS = WEATHER.replace("arguments", "parameters")
LLAMA: dict[str, tuple[str, list[Event]]] = {
    "one": (PARAMETERS, call(0, "get_weather", BROOKLYN)),
    "tagged": (f"<|python_tag|>{PARAMETERS}", call(0, "get_weather", BROOKLYN)),
    "with arguments": (f"\n\n{WEATHER}", call(0, "get_weather", BROOKLYN)),
    "several": (
        f'{PARAMETERS}; {{"name": "stop", "parameters": {{}}}}\n{{"name": "stop"}};',
        [*call(0, "get_weather", BROOKLYN), *call(1, "stop", "{}"), *call(2, "stop", "{}")],
    ),
    "two semicolons": (f"{PARAMETERS};; {WEATHER}", [*call(0, "get_weather", BROOKLYN), *text(f";; {WEATHER}")]),
    "text, then tagged": (f"Sure: <|python_tag|>{PARAMETERS}", [*text("Sure: "), *call(0, "get_weather", BROOKLYN)]),
    "text, then an object": (f"Sure: {PARAMETERS}", text(f"Sure: {PARAMETERS}")),
    "some other JSON": ('{"answer": {"name": "stop"}}', text('{"answer": {"name": "stop"}}')),
    "code": ("<|python_tag|>print(1)", text("<|python_tag|>print(1)")),
    "text after": (f"{PARAMETERS}; and", [*call(0, "get_weather", BROOKLYN), *text("; and")]),
}
MISTRAL: dict[str, tuple[str, list[Event]]] = {
    "array": (f"[TOOL_CALLS][{WEATHER}]", call(0, "get_weather", BROOKLYN)),
    "array of two": (
        f'[TOOL_CALLS] [ {WEATHER} ,\n{{"arguments": {{}}, "name": "stop"}} ] ',
        [*call(0, "get_weather", BROOKLYN), *call(1, "stop", "{}")],
    ),
    "text before": (f"Yes. [TOOL_CALLS][{WEATHER}]", [*text("Yes. "), *call(0, "get_weather", BROOKLYN)]),
    "newer": (f"[TOOL_CALLS]get_weather[ARGS]{BROOKLYN}", call(0, "get_weather", BROOKLYN)),
    "newer, two": (
        f"[TOOL_CALLS]get_weather[ARGS]{BROOKLYN}[TOOL_CALLS]stop[ARGS]{{}}",
        [*call(0, "get_weather", BROOKLYN), *call(1, "stop", "{}")],
    ),
    "newer, with an id": (
        f"[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{BROOKLYN}",
        call(0, "get_weather", BROOKLYN),
    ),
    "newer, without a marker": (f"[TOOL_CALLS]get_weather{BROOKLYN}", call(0, "get_weather", BROOKLYN)),
    "newer, unknown": ("[TOOL_CALLS]rm[ARGS]{}", text("[TOOL_CALLS]rm[ARGS]{}")),
    "newer, broken": ("[TOOL_CALLS]stop[ARGS]now", call(0, "stop", "now")),
    "newer, cut": ("[TOOL_CALLS]sto", text("[TOOL_CALLS]sto")),
    "second unknown": (
        f'[TOOL_CALLS][{WEATHER}, {{"name": "rm"}}]',
        [*call(0, "get_weather", BROOKLYN), *text(', {"name": "rm"}]')],
    ),
    "an array that breaks off, then another": (
        f"[TOOL_CALLS][{WEATHER}, no [TOOL_CALLS][{WEATHER}]",
        [*call(0, "get_weather", BROOKLYN), *text(", no "), *call(1, "get_weather", BROOKLYN)],
    ),
    "cut between": (f"[TOOL_CALLS][{WEATHER}, ", call(0, "get_weather", BROOKLYN)),
    "brackets in text": ("a[0] = [TOOL", text("a[0] = [TOOL")),
}
TGI = '{"function": {"_name": "get_weather", "location": "Brooklyn", "days": [1, {"_name": 2}]}}'
JSON_CALLS: dict[str, tuple[str, list[Event]]] = {
    "one": (f" \n{WEATHER}\n", call(0, "get_weather", BROOKLYN)),
    "array": (
        f'[\n {WEATHER},\n {{"name":"stop","arguments":{{}}}}\n]',
        [*call(0, "get_weather", BROOKLYN), *call(1, "stop", "{}")],
    ),
    "cut": ('[{"name":"search","arguments":{"q": ', call(0, "search", '{"q": ')),
    "cut before the name": ('[{"na', text('[{"na')),
    "TGI": (TGI, call(0, "get_weather", '{ "location": "Brooklyn", "days": [1, {"_name": 2}]}')),
    "TGI, nothing else": ('{"function": {"_name": "stop"}}', call(0, "stop", "{}")),
    "TGI, name last": (
        '{ "function" : {"a": "x,}", "b": 2 , "_name": "search" } }',
        call(0, "search", '{"a": "x,}", "b": 2 }'),
    ),
    "TGI, name between": ('{"function":{"a":1,"_name":"search","b":{}}}', call(0, "search", '{"a":1,"b":{}}')),
    "TGI, unknown": ('{"function": {"_name": "rm", "a": 1}}', text('{"function": {"_name": "rm", "a": 1}}')),
    "TGI, no name": ('{"function": {"a": 1}}', text('{"function": {"a": 1}}')),
    "words": ("I cannot.", text("I cannot.")),
}
JSON_ANSWER: dict[str, tuple[str, list[Event]]] = {
    "bare": (PARAMETERS, call(0, "get_weather", BROOKLYN)),
    "fenced": (f"```json\n{PARAMETERS}\n```\n", call(0, "get_weather", BROOKLYN)),
    "fenced without a language": (f"```\n{PARAMETERS}\n```", call(0, "get_weather", BROOKLYN)),
    "TGI": (TGI, call(0, "get_weather", '{ "location": "Brooklyn", "days": [1, {"_name": 2}]}')),
    "other code": ("```python\nx\n```", text("```python\nx\n```")),
    "other JSON": ('```json\n{"a": 1}\n```', text('```json\n{"a": 1}\n```')),
    "an array": (f"[{WEATHER}]", text(f"[{WEATHER}]")),
    "text first": (f"Here: {WEATHER}", text(f"Here: {WEATHER}")),
    "text after": (f"{WEATHER} there.", [*call(0, "get_weather", BROOKLYN), *text(" there.")]),
    "half a fence": ("``", text("``")),
}
PLAIN: dict[str, tuple[str, list[Event]]] = {
    "text": (f" \n<tool_call>{WEATHER}", text(f" \n<tool_call>{WEATHER}")),
    "nothing": ("", []),
}
THINKS: dict[str, tuple[str, list[Event]]] = {
    "thought and answer": ("<think>\nWell,\n\nso.\n</think>\n\nHi.", [*thought("Well,\n\nso."), *text("Hi.")]),
    "spaces stay": ("\n <think> a </think> b", [*thought(" a "), *text(" b")]),
    "no thought": ("Hi <think>no</think>", text("Hi <think>no</think>")),
    "blank before no thought": (" \nHi", text(" \nHi")),
    "empty thought": ("<think>\n\n</think>\n\nHi", text("Hi")),
    "a call in the thought": (
        f"<think>I write <tool_call>{{</think><tool_call>{WEATHER}</tool_call>",
        [*thought("I write <tool_call>{"), *call(0, "get_weather", BROOKLYN)],
    ),
    "a second thought": ("<think>a</think>b<think>c</think>", [*thought("a"), *text("b<think>c</think>")]),
    "cut": ("<think>a\n</thi", thought("a\n</thi")),
    "cut start": ("<thi", text("<thi")),
    "almost the end": ("<think>a</thinker>\n</think>b", [*thought("a</thinker>"), *text("b")]),
}
THINKS_INSIDE: dict[str, tuple[str, list[Event]]] = {
    "thought and answer": ("\nWell.\n</think>\n\nHi.", [*thought("Well."), *text("Hi.")]),
    "the marker again": ("<think>\nWell.</think>Hi.", [*thought("Well."), *text("Hi.")]),
    "no end": ("Well <think>", thought("Well <think>")),
    "no thought": ("</think>\n\nHi", text("Hi")),
}

TRANSCRIPTS = [
    pytest.param(name, reasoning, answer, events, id=f"{name}{reasoning and f'-{reasoning}'}: {case}")
    for name, reasoning, table in (
        ("hermes", "", HERMES),
        ("llama3_json", "", LLAMA),
        ("mistral", "", MISTRAL),
        ("json_calls", "", JSON_CALLS),
        ("json", "", JSON_ANSWER),
        ("plain", "", PLAIN),
        ("hermes", "told", THINKS),
        ("hermes", "inside", THINKS_INSIDE),
    )
    for case, (answer, events) in table.items()
]


@pytest.mark.parametrize(("name", "reasoning", "answer", "events"), TRANSCRIPTS)
def test_whole(name: str, reasoning: str, answer: str, events: list[Event]) -> None:
    assert parsed(name, [answer], reasoning) == events


@pytest.mark.parametrize(("name", "reasoning", "answer", "events"), TRANSCRIPTS)
def test_a_character_at_a_time(name: str, reasoning: str, answer: str, events: list[Event]) -> None:
    assert parsed(name, list(answer), reasoning) == events
