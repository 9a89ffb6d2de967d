"""Answers of models in each format, and their parts: real forms, and broken ones."""

from __future__ import annotations

from json_call_answers import BROOKLYN, LOOK, PARAMETERS, STOP, Table
from json_call_answers import TABLES as JSON_TABLES
from parser_events import Call, Thought
from tagged_answers import TABLES as TAGGED_TABLES

TABLES: dict[str, Table] = JSON_TABLES | TAGGED_TABLES
"""By format, and reasoning that may start before the answer or in the prompt."""

V3_LOOK = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{BROOKLYN}\n```<｜tool▁call▁end｜>"
V31_LOOK = f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{BROOKLYN}<｜tool▁call▁end｜>"
TABLES["deepseek_v3"] = {
    "V3": (f"<｜tool▁calls▁begin｜>{V3_LOOK}<｜tool▁calls▁end｜>", [LOOK]),
    "V3, two": (f"Yes.\n\n<｜tool▁calls▁begin｜>{V3_LOOK}\n{V3_LOOK}<｜tool▁calls▁end｜>", ["Yes.\n\n", LOOK, LOOK]),
    "V3.1": (f"<｜tool▁calls▁begin｜>{V31_LOOK}<｜tool▁calls▁end｜>", [LOOK]),
    "V3.1, two, and text": (f"<｜tool▁calls▁begin｜>{V31_LOOK}{V31_LOOK}<｜tool▁calls▁end｜> ok", [LOOK, LOOK, " ok"]),
    "no section": (V31_LOOK, [LOOK]),
    "no ends": (f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{BROOKLYN}", [LOOK]),
    "text between": (f"<｜tool▁calls▁begin｜>{V31_LOOK} and {V31_LOOK}", [LOOK, " and ", LOOK]),
    "broken arguments": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>stop<｜tool▁sep｜>{oops}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [Call("stop", "{oops}")],
    ),
    "unknown tool": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>rm<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        None,
    ),
    "no call": ("<｜tool▁calls▁begin｜> none <｜tool▁calls▁end｜>", None),
    "cut in the name": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_", None),
}
TABLES["kimi_k2"] = {
    "one, with text": (
        f"Yes.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{BROOKLYN}"
        "<|tool_call_end|><|tool_call_begin|>stop<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        ["Yes.", LOOK, STOP],
    ),
    "text before the calls": (
        "<|tool_calls_section_begin|> so <|tool_call_begin|>stop<|tool_call_argument_begin|>{}<|tool_call_end|>",
        [STOP],
    ),
    "an empty section": ("Yes.<|tool_calls_section_begin|>\n<|tool_calls_section_end|> No.", ["Yes. No."]),
    "a call without arguments": (
        "<|tool_calls_section_begin|><|tool_call_begin|>stop<|tool_call_end|><|tool_call_begin|>stop:1"
        "<|tool_call_argument_begin|>{}<|tool_call_end|>",
        ["<|tool_calls_section_begin|><|tool_call_begin|>stop<|tool_call_end|>", STOP],
    ),
    "cut in the opening": ("Yes.<|tool_calls_section_begin|><|tool_call_begin|>", ["Yes."]),
}
GEMMA_LOOK = '<|tool_call>call:get_weather{location:<|"|>Brooklyn, NY<|"|>,unit:<|"|>celsius<|"|>}<tool_call|>'
TABLES["gemma4"] = {
    "one": (GEMMA_LOOK, [LOOK]),
    "two, with text": (f"I look. {GEMMA_LOOK}<|tool_call>call:stop{{}}<tool_call|>", ["I look. ", LOOK, STOP]),
    "every type": (
        '<|tool_call>call:search{a:42,b:-1.5e3,c:true,d:null,e:[<|"|>x<|"|>,{f:[]}],<|"|>g h<|"|>:{i:<|"|><|"|>}, "j": "k\\""}<tool_call|>',
        [
            Call(
                "search",
                '{"a": 42, "b": -1500.0, "c": true, "d": null, "e": ["x", {"f": []}], "g h": {"i": ""}, "j": "k\\""}',
            )
        ],
    ),
    "marks in a text": (
        '<|tool_call>call:search{q:<|"|>{"a": [1, <|x|> <|\\n}<tool_call|><|"|>}<tool_call|>',
        [Call("search", r'{"q": "{\"a\": [1, <|x|> <|\\n}<tool_call|>"}')],
    ),
    "texts without quotes": (
        "<|tool_call>call:search{q:New York,r:1.,s:,t:<b>}<tool_call|>",
        [Call("search", '{"q": "New York", "r": 1.0, "s": "", "t": "<b>"}')],
    ),
    "reasoning": (f"<|channel>thought\nI look.\n\nWell.\n<channel|>{GEMMA_LOOK}", [Thought("I look.\n\nWell."), LOOK]),
    "reasoning and text": ("<|channel>thought\nSo.\n<channel|>\nHi\n", [Thought("So."), "Hi\n"]),
    "empty reasoning": ("<|channel>thought\n<channel|>Hi", ["Hi"]),
    "reasoning that does not end": (f"<|channel>thought\nSo.{GEMMA_LOOK}", [Thought("So."), LOOK]),
    "another channel": ("<|channel>though not<channel|>Hi", [Thought("though not"), "Hi"]),
    "cut in the reasoning": ("<|channel>thought\nSo\n<chan", [Thought("So\n<chan")]),
    "cut in the channel": ("<|channel>thou", []),
    "no end": (GEMMA_LOOK.removesuffix("<tool_call|>"), [LOOK]),
    "broken arguments": ("<|tool_call>call:search{q}<tool_call|> ok", [Call("search", "{q}"), " ok"]),
    "unknown tool": ("<|tool_call>call:rm{}<tool_call|>", None),
    "cut in a text": (GEMMA_LOOK.partition(", NY")[0], [Call("get_weather", '{"location": "Brooklyn')]),
    "cut in the name": ("<|tool_call>call:get_", None),
    "no word before the name": (GEMMA_LOOK.replace("call:get", ":get"), [LOOK]),
    "a call after a broken one": (f"<|tool_call>call:search q{GEMMA_LOOK}", ["<|tool_call>call:search q", LOOK]),
    "a call after a broken one that ends": (
        f"<|tool_call>call:search q<tool_call|>{GEMMA_LOOK}",
        ["<|tool_call>call:search q<tool_call|>", LOOK],
    ),
}
TABLES["functiongemma"] = {
    case: (
        TABLES["gemma4"][case][0].replace("<|tool_call>", "<start_function_call>").replace("<tool_call|>", "<end_function_call>")
        .replace('<|"|>', "<escape>"),
        TABLES["gemma4"][case][1],
    )
    for case in ("one", "two, with text", "texts without quotes", "no end", "cut in a text", "no word before the name")
}  # fmt: skip
PYTHON_LOOK = "get_weather(location='Brooklyn, NY', unit=\"celsius\")"
TABLES["llama4_pythonic"] = {
    "one": (f"[{PYTHON_LOOK}]", [LOOK]),
    "two, tagged": (f"<|python_start|>[{PYTHON_LOOK}, stop()]<|python_end|>", [LOOK, STOP]),
    "text, then tagged": (f"Sure: <|python_start|>[{PYTHON_LOOK}]<|python_end|> ok", ["Sure: ", LOOK, " ok"]),
    "every type": (
        "\n[search(q=None, deep=True, limit=-1_000, score=.5, sites=['a', (1,)], filter={'k': {}, 2: False,},)]",
        [
            Call(
                "search",
                '{"q": null, "deep": true, "limit": -1000, "score": 0.5, "sites": ["a", [1]], "filter": {"k": {}, "2": false}}',
            )
        ],
    ),
    "escapes": (
        r"""[search(q='it\'s "\n\x41\u00e9\U0001F600\q', r='', s="")]""",
        [Call("search", r'{"q": "it' + r"'" + r's \"\nAé😀\\q", "r": "", "s": ""}')],
    ),
    "an escape above Unicode": (r"[search(q='\U0011FFFF')]", [Call("search", r"""{"q": "\U0011FFFF')]""")]),
    "three quotes": ('[search(q="""a "b"\n""")]', [Call("search", r'{"q": "a \"b\"\n"}')]),
    "JSON, as Llama 4's template asks for": (f"<|python_start|>{PARAMETERS}<|python_end|>", [LOOK]),
    "JSON words": ("[search(deep=true, page=null)]", [Call("search", '{"deep": true, "page": null}')]),
    "a position": ("[search('a')]", [Call("search", "{'a')]")]),
    "an expression": ("[search(q=a + b)]", [Call("search", '{"q": a + b)]')]),
    "infinity": ("[search(score=1e999)]", [Call("search", '{"score": 1e999)]')]),
    "unknown tool": (f"[{PYTHON_LOOK}, rm(a=1)]", [LOOK, ", rm(a=1)]"]),
    "a list": ("[1, 2]", None),
    "a link": ("[search](q)", None),
    "code": ("<|python_start|>print(1)<|python_end|>", None),
    "cut in a text": ("[search(q='a", [Call("search", '{"q": "a')]),
    "cut in the name": ("[sear", None),
    "cut between": (f"[{PYTHON_LOOK}, ", [LOOK]),
}
TABLES["lfm2"] = {
    "one": (f"<|tool_call_start|>[{PYTHON_LOOK}]<|tool_call_end|>", [LOOK]),
    "two, with text": (
        f"Yes. <|tool_call_start|> [{PYTHON_LOOK}, stop()]<|tool_call_end|>\nNo.",
        ["Yes. ", LOOK, STOP, "\nNo."],
    ),
    "a number with a zero in front": ("<|tool_call_start|>[search(limit=07)]", [Call("search", '{"limit": 7}')]),
    "no marker": (f"[{PYTHON_LOOK}]", None),
    "unknown tool": ("<|tool_call_start|>[rm()]<|tool_call_end|>", None),
    "cut in the opening": ("Yes.<|tool_call_start|>", ["Yes."]),
}
TABLES["olmo3"] = {
    "one": (f"<function_calls>\n{PYTHON_LOOK}\n</function_calls>", [LOOK]),
    "two, with text": (f"Yes.<function_calls>{PYTHON_LOOK}\nstop()</function_calls> No.", ["Yes.", LOOK, STOP, " No."]),
    "JSON words": ("<function_calls>search(deep=true, page=null)", [Call("search", '{"deep": true, "page": null}')]),
    "text after a call": (f"<function_calls>{PYTHON_LOOK}\n- so</function_calls>", [LOOK, "\n- so"]),
    "unknown tool": ("<function_calls>\nrm()\n</function_calls>", None),
    "an empty block": ("<function_calls>\n</function_calls>", []),
    "no marker": (PYTHON_LOOK, None),
}
HARMONY_LOOK = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{BROOKLYN}<|call|>"
THINKING = "<|channel|>analysis<|message|>User asks.\nLook.<|end|><|start|>assistant"
LOOKED = Thought("User asks.\nLook.")
TABLES["openai"] = {
    "answer": (f"{THINKING}<|channel|>final<|message|>Hi.<|return|>", [LOOKED, "Hi."]),
    "call": (THINKING + HARMONY_LOOK, [LOOKED, LOOK]),
    "preamble and two calls": (
        f"{THINKING}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{HARMONY_LOOK}<|start|>assistant"
        "<|channel|>commentary to=functions.stop <|constrain|>json<|message|>{}<|call|>",
        [LOOKED, "I look.", LOOK, STOP],
    ),
    "recipient before the channel": (
        HARMONY_LOOK.replace(
            "<|channel|>commentary to=functions.get_weather ", " to=functions.get_weather<|channel|>commentary "
        ),
        [LOOK],
    ),
    "a call in the analysis, without a type": (
        f"<|channel|>analysis to=functions.get_weather<|message|>{BROOKLYN}<|call|>",
        [LOOK],
    ),
    "no arguments": ("<|channel|>commentary to=functions.stop<|message|><|call|>", [STOP]),
    "arguments that are no JSON": (
        "<|channel|>commentary to=functions.stop code<|message|>now<|call|>",
        [Call("stop", "now")],
    ),
    "unknown tool": ("<|channel|>commentary to=functions.rm<|message|>{}<|call|>", ["{}"]),
    "a built-in tool": ("<|channel|>analysis to=python code<|message|>1+1<|call|>", [Thought("1+1")]),
    "messages of one kind": (
        "<|channel|>commentary<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>",
        ["a\nb"],
    ),
    "text after a call": (f"{HARMONY_LOOK}<|start|>assistant<|channel|>final<|message|>Done.", [LOOK, "Done."]),
    "no ends": (
        "<|channel|>analysis<|message|>a<|channel|>final<|message|>b<|start|>assistant<|channel|>analysis<|message|>c",
        [Thought("a"), "b", Thought("c")],
    ),
    "no header": ("Hi <b>.", None),
    "almost a header": ("to be or not", None),
    "a header without a message": ("<|channel|>final<|end|><|start|>assistant<|channel|>final<|message|>b", ["b"]),
    "a long header": ("to=" + "x" * 500, None),
    "cut in the analysis": ("<|channel|>analysis<|message|>a <|en", [Thought("a <|en")]),
    "cut in the header": ("<|channel|>analy", []),
    "no message marker": (f'{THINKING}<|channel|>final {{"ok": 1}}<|return|>', [LOOKED, '{"ok": 1}']),
    "no message marker, a thought, then a start": (
        "<|channel|>analysis So.<|start|>assistant<|channel|>final<|message|>b",
        [Thought("So."), "b"],
    ),
    "no message marker, long": (f"<|channel|>final {'word ' * 99}<|return|>", ["word " * 99]),
    "no message marker, calls": (
        HARMONY_LOOK.replace("<|message|>", "") + HARMONY_LOOK.replace("<|constrain|>json<|message|>", ""),
        [LOOK, LOOK],
    ),
    "no message marker, cut in the type": ("<|channel|>commentary to=functions.stop js", []),
    "cut in the arguments": (HARMONY_LOOK.partition(", NY")[0], [Call("get_weather", '{"location": "Brooklyn')]),
}
TABLES["mistral+outside"] = {
    "thought and call": (
        f"[THINK]I look.\n[/THINK]Yes.[TOOL_CALLS]get_weather[ARGS]{BROOKLYN}",
        [Thought("I look."), "Yes.", LOOK],
    ),
}
