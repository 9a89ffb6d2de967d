"""Answers of models that write calls as JSON, and their parts: real forms, and broken ones."""

from __future__ import annotations

from typing import Any

from parser_events import Call, Part, Thought

Table = dict[str, tuple[str, list[Part] | None]]
"""(answer, parts) by case; None: the answer is one text."""

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"location": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["location"],
    },
    "search": {
        "properties": {
            "q": {"type": "string"},
            "limit": {"type": "integer"},
            "score": {"type": "number"},
            "deep": {"type": "boolean"},
            "sites": {"type": "array", "items": {"type": "string"}},
            "filter": {"$ref": "#/$defs/filter"},
            "page": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "code": {"type": ["string", "null"]},
        },
        "$defs": {"filter": {"type": "object"}},
    },
    "stop": {},
}
"""The schemas of the tools that the answers call."""

BROOKLYN = '{"location": "Brooklyn, NY", "unit": "celsius"}'
LOOK, STOP = Call("get_weather", BROOKLYN), Call("stop", "{}")
WEATHER = '{"name": "get_weather", "arguments": ' + BROOKLYN + "}"
DEEP = '{"a":' * 70 + "1" + "}" * 70
TABLES: dict[str, Table] = {}
"""By format, and reasoning that may start before the answer or in the prompt."""

TABLES["hermes"] = {
    "one": (f"<tool_call>\n{WEATHER}\n</tool_call>", [LOOK]),
    "text before and after": (
        f"Let me look.\n<tool_call>\n{WEATHER}\n</tool_call>\nDone.",
        ["Let me look.\n", LOOK, "\nDone."],
    ),
    "two": (
        f'\n<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{{"name": "stop", "arguments": {{}}}}\n</tool_call>\n',
        [LOOK, STOP],
    ),
    "arguments first": (
        '<tool_call>{"arguments": { "q" : [1, -2.5e+3, null] }, "name": "search"}</tool_call>',
        [Call("search", '{ "q" : [1, -2.5e+3, null] }')],
    ),
    "a string of JSON": (
        r'<tool_call>{"name":"search","arguments":"{\"q\": \"a\\nb \u00e9 \ud83d\ude00 {\"}"}</tool_call>',
        [Call("search", r'{"q": "a\nb é 😀 {"}')],
    ),
    "a newline in a string of JSON": (
        r'<tool_call>{"name":"search","arguments":"{\"q\": \"a\nb\"}"}</tool_call>',
        [Call("search", r'{"q": "a\nb"}')],
    ),
    "an empty string": ('<tool_call>{"name":"stop","arguments":""}</tool_call>', [STOP]),
    "null": ('<tool_call>{"name":"stop","arguments":null}</tool_call>', [STOP]),
    "no arguments": ('<tool_call>{"name":"stop"}</tool_call>', [STOP]),
    "other keys": (
        '<tool_call>{"type":"function","id":{"name":"x","n":[1.5]},"name":"stop","arguments":{},"z":0}</tool_call>',
        [STOP],
    ),
    "markers in a string": (
        '<tool_call>{"name":"search","arguments":{"q":"</tool_call> } <tool_call>{"}}</tool_call>',
        [Call("search", '{"q":"</tool_call> } <tool_call>{"}')],
    ),
    "a bare newline in a string": (
        '<tool_call>{"name":"search","arguments":{"q":"a\nb\tc"}}</tool_call>',
        [Call("search", r'{"q":"a\nb\tc"}')],
    ),
    "no end tag": (f"<tool_call>{WEATHER}", [LOOK]),
    "no end tag, then another": (f"<tool_call>{WEATHER}\n<tool_call>{WEATHER}", [LOOK, LOOK]),
    "a brace short": (f"<tool_call>{WEATHER[:-1]}\n</tool_call>", [LOOK]),
    "a brace too many": (f"<tool_call>{WEATHER}}}</tool_call>", [LOOK, "}"]),
    "unknown tool": ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', None),
    "no JSON": ("<tool_call>\nsearch(q=1)\n</tool_call>", None),
    "an opening too many": (f"<tool_call>\n<tool_call>{WEATHER}", [LOOK]),
    "an empty block": ("a <tool_call>\n</tool_call> b", ["a  b"]),
    "cut in the opening": ("I look.\n<tool_call>\n", ["I look.\n"]),
    "a number for a name": ('<tool_call>{"name": 5}', None),
    "a list of arguments, before the name": ('<tool_call>{"arguments": [1], "name": "stop"}</tool_call>', None),
    "a list of arguments, after the name": (
        '<tool_call>{"name": "stop", "arguments": [1]}</tool_call>',
        [Call("stop", "[1]}")],
    ),
    "a word for arguments": ('<tool_call>{"name": "stop", "arguments": "now"}</tool_call>', [Call("stop", '"now"}')]),
    "broken arguments": (
        '<tool_call>{"name": "search", "arguments": {"q": oops}}</tool_call> ok',
        [Call("search", '{"q": oops}}'), " ok"],
    ),
    "the name is all": ('<tool_call>{"name": "stop"</tool_call>', [STOP]),
    "too deep before the name": (f'<tool_call>{{"arguments": {DEEP}, "name": "search"}}', None),
    "too deep after the name": (
        f'<tool_call>{{"name": "search", "arguments": {DEEP}}}</tool_call>',
        [Call("search", DEEP + "}")],
    ),
    "a long name": ('<tool_call>{"name": "' + "x" * 300, None),
    "cut in the name": ('<tool_call>{"name": "sea', None),
    "cut in the arguments": ('<tool_call>{"name": "search", "arguments": {"q": "a', [Call("search", '{"q": "a')]),
    "cut in the marker": ("so <tool_c", None),
    "cut in the end tag": (f"<tool_call>{WEATHER}</tool_", [LOOK, "</tool_"]),
    "only whitespace": (" \n ", None),
    "a stray end tag": ("a </tool_call> b", None),
}
PARAMETERS = WEATHER.replace("arguments", "parameters")
TABLES["llama3_json"] = {
    "one": (PARAMETERS, [LOOK]),
    "tagged": (f"<|python_tag|>{PARAMETERS}", [LOOK]),
    "with arguments": (f"\n\n{WEATHER}", [LOOK]),
    "several": (f'{PARAMETERS}; {{"name": "stop", "parameters": {{}}}}\n{{"name": "stop"}};', [LOOK, STOP, STOP]),
    "two semicolons": (f"{PARAMETERS};; {WEATHER}", [LOOK, f";; {WEATHER}"]),
    "text, then tagged": (f"Sure: <|python_tag|>{PARAMETERS}", ["Sure: ", LOOK]),
    "text, then an object": (f"Sure: {PARAMETERS}", None),
    "some other JSON": ('{"answer": {"name": "stop"}}', None),
    "code": ("<|python_tag|>print(1)", None),
    "text after": (f"{PARAMETERS}; and", [LOOK, "; and"]),
}
TABLES["mistral"] = {
    "array": (f"[TOOL_CALLS][{WEATHER}]", [LOOK]),
    "array of two": (f'[TOOL_CALLS] [ {WEATHER} ,\n{{"arguments": {{}}, "name": "stop"}} ] ', [LOOK, STOP]),
    "text before": (f"Yes. [TOOL_CALLS][{WEATHER}]", ["Yes. ", LOOK]),
    "newer": (f"[TOOL_CALLS]get_weather[ARGS]{BROOKLYN}", [LOOK]),
    "newer, two": (f"[TOOL_CALLS]get_weather[ARGS]{BROOKLYN}[TOOL_CALLS]stop[ARGS]{{}}", [LOOK, STOP]),
    "newer, with an id": (f"[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{BROOKLYN}", [LOOK]),
    "newer, without a marker": (f"[TOOL_CALLS]get_weather{BROOKLYN}", [LOOK]),
    "newer, unknown": ("[TOOL_CALLS]rm[ARGS]{}", None),
    "newer, broken": ("[TOOL_CALLS]stop[ARGS]now", [Call("stop", "now")]),
    "newer, cut": ("[TOOL_CALLS]sto", None),
    "second unknown": (f'[TOOL_CALLS][{WEATHER}, {{"name": "rm"}}]', [LOOK, ', {"name": "rm"}]']),
    "an array that breaks off, then another": (
        f"[TOOL_CALLS][{WEATHER}, no [TOOL_CALLS][{WEATHER}]",
        [LOOK, ", no ", LOOK],
    ),
    "cut between": (f"[TOOL_CALLS][{WEATHER}, ", [LOOK]),
    "brackets in text": ("a[0] = [TOOL", None),
}
TABLES["json_calls"] = {
    "one": (f" \n{WEATHER}\n", [LOOK]),
    "array": (f'[\n {WEATHER},\n {{"name":"stop","arguments":{{}}}}\n]', [LOOK, STOP]),
    "cut": ('[{"name":"search","arguments":{"q": ', [Call("search", '{"q": ')]),
    "cut before the name": ('[{"na', None),
    "words": ("I cannot.", None),
}
TABLES["json"] = {
    "bare": (PARAMETERS, [LOOK]),
    "fenced": (f"```json\n{PARAMETERS}\n```\n", [LOOK]),
    "fenced without a language": (f"```\n{PARAMETERS}\n```", [LOOK]),
    "other code": ("```python\nx\n```", None),
    "other JSON": ('```json\n{"a": 1}\n```', None),
    "an array": (f"[{WEATHER}]", None),
    "text first": (f"Here: {WEATHER}", None),
    "text after": (f"{WEATHER} there.", [LOOK, " there."]),
    "half a fence": ("``", None),
}
TABLES["plain"] = {
    "text": (f" \n<tool_call>{WEATHER}", None),
    "nothing": ("", None),
}
STOPPED = '{"name": "stop", "arguments": {}}'
TABLES["granite"] = {
    "one": (f"<|tool_call|>[{WEATHER}]", [LOOK]),
    "two, as text": (f"Yes.<tool_call> [{WEATHER}, {STOPPED}]\nNo.", ["Yes.", LOOK, STOP, "\nNo."]),
    "no array": (f"<|tool_call|> {WEATHER}", [LOOK]),
    "unknown tool": ('<|tool_call|>[{"name": "rm", "arguments": {}}]', None),
    "cut in the opening": ("Yes.<|tool_call|>", ["Yes."]),
    "cut in a text": (f"<|tool_call|>[{WEATHER.partition(', NY')[0]}", [Call("get_weather", '{"location": "Brooklyn')]),
}
TABLES["phi4_mini_json"] = {
    "one": (f"functools[{WEATHER}]", [LOOK]),
    "two, with tokens": (f"Yes.<|tool_call|>[{WEATHER}, {STOPPED}]<|/tool_call|> No.", ["Yes.", LOOK, STOP, " No."]),
    "code": ("import functools", None),
    "an empty array": ("functools[] is it", None),
}
TABLES["hunyuan_a13b"] = {
    "one": (f"<tool_calls>[{WEATHER}]</tool_calls>", [LOOK]),
    "two, with text": (f"Yes.<tool_calls>[{WEATHER}, {STOPPED}]\n</tool_calls> No.", ["Yes.", LOOK, STOP, " No."]),
    "an empty block": ("<tool_calls>\n</tool_calls>", []),
}
TABLES["apertus"] = {
    "one": (f'<|tools_prefix|>[{{"get_weather": {BROOKLYN}}}]<|tools_suffix|>', [LOOK]),
    "two, with text": (
        f'Yes.<|tools_prefix|>[{{"get_weather": {BROOKLYN}}}, {{"stop": {{}}}}]<|tools_suffix|> No.',
        ["Yes.", LOOK, STOP, " No."],
    ),
    "a name with an escape": ('<|tools_prefix|>[{"st\\u006fp": {}}]', [STOP]),
    "no object": ('<|tools_prefix|>[{"stop": [1]}]<|tools_suffix|>', [Call("stop", "[1]}]")]),
    "two names": ('<|tools_prefix|>[{"stop": {}, "search": {}}]', [STOP]),
    "unknown tool": ('<|tools_prefix|>[{"rm": {}}]<|tools_suffix|>', None),
}
COMMAND = '{{"tool_call_id": "{}", "tool_name": "{}", "parameters": {}}}'.format
TABLES["cohere_command"] = {
    "one": (f"<|START_ACTION|>[\n    {COMMAND(0, 'get_weather', BROOKLYN)}\n]<|END_ACTION|>", [LOOK]),
    "two": (
        f"<|START_ACTION|>[\n    {COMMAND(0, 'get_weather', BROOKLYN)},\n    {COMMAND(1, 'stop', '{}')}\n]<|END_ACTION|>",
        [LOOK, STOP],
    ),
    "an answer": ("<|START_RESPONSE|>Yes.<|END_RESPONSE|>", ["Yes."]),
    "a name": (f"<|START_ACTION|>[{WEATHER}]<|END_ACTION|>", None),
}
TABLES["hermes+outside"] = {
    "thought and answer": ("<think>\nWell,\n\nso.\n</think>\n\nHi.", [Thought("Well,\n\nso."), "Hi."]),
    "spaces stay": ("\n <think> a </think> b", [Thought(" a "), " b"]),
    "no thought": ("Hi <think>no</think>", None),
    "blank before no thought": (" \nHi", None),
    "empty thought": ("<think>\n\n</think>\n\nHi", ["Hi"]),
    "a call in the thought": (
        f"<think>I look.\n\n<tool_call>{WEATHER}</tool_call> Well.",
        [Thought("I look."), LOOK, " Well."],
    ),
    "no call in the thought": ("<think>I write <tool_call>{</think>", [Thought("I write "), "<tool_call>{</think>"]),
    "a second thought": ("<think>a</think>b<think>c</think>", [Thought("a"), "b<think>c</think>"]),
    "cut": ("<think>a\n</thi", [Thought("a\n</thi")]),
    "cut start": ("<thi", None),
    "almost the end": ("<think>a</thinker>\n</think>b", [Thought("a</thinker>"), "b"]),
}
TABLES["hermes+inside"] = {
    "thought and answer": ("\nWell.\n</think>\n\nHi.", [Thought("Well."), "Hi."]),
    "the marker again": ("<think>\nWell.</think>Hi.", [Thought("Well."), "Hi."]),
    "no end": ("Well <think>", [Thought("Well <think>")]),
    "no thought": ("</think>\n\nHi", ["Hi"]),
}
