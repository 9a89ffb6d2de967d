"""Answers of models that write calls in tags, and their parts: real forms, and broken ones."""

from __future__ import annotations

import re

from json_call_answers import LOOK, STOP, WEATHER, Table
from parser_events import Call, Thought

QWEN_LOOK = (
    "<tool_call>\n<function=get_weather>\n<parameter=location>\nBrooklyn, NY\n</parameter>\n<parameter=unit>\ncelsius\n"
    "</parameter>\n</function>\n</tool_call>"
)


def qwen(*parameters: tuple[str, str]) -> str:
    """Return a call of `search` with values as they are written."""
    written = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in parameters)
    return f"<tool_call>\n<function=search>\n{written}</function>\n</tool_call>"


TABLES: dict[str, Table] = {}
"""By format, and reasoning that may start before the answer or in the prompt."""

TABLES["qwen3_coder"] = {
    "one": (QWEN_LOOK, [LOOK]),
    "text before and after": (f"Let me look.\n{QWEN_LOOK}\nDone.", ["Let me look.\n", LOOK, "\nDone."]),
    "two": (f"{QWEN_LOOK}\n<tool_call>\n<function=stop>\n</function>\n</tool_call>\n", [LOOK, STOP]),
    "every type": (
        qwen(("q", "1"), ("limit", "-3"), ("score", "1e-5"), ("deep", "True"), ("sites", '["a", 1]'), ("filter", "{}")),
        [Call("search", '{"q": "1", "limit": -3, "score": 1e-5, "deep": true, "sites": ["a", 1], "filter": {}}')],
    ),
    "null": (
        qwen(("page", "null"), ("page", "None"), ("page", "2"), ("code", "null"), ("q", "null")),
        [Call("search", '{"page": null, "page": null, "page": 2, "code": null, "q": "null"}')],
    ),
    "Python in place of JSON": (
        qwen(("filter", "{'a': (None, True)}")),
        [Call("search", '{"filter": {"a": [null, true]}}')],
    ),
    "values that do not fit": (
        qwen(
            ("limit", "ten"),
            ("limit", "1.5"),
            ("limit", "2.0"),
            ("deep", "yes"),
            ("sites", "{}"),
            ("filter", "[1"),
            ("page", ""),
        ),
        [
            Call(
                "search",
                '{"limit": "ten", "limit": "1.5", "limit": 2, "deep": "yes", "sites": "{}", "filter": "[1", "page": ""}',
            )
        ],
    ),
    "a text that may be null": (
        qwen(("code", "nul"), ("code", "None!"), ("code", "x = 1\n"), ("code", ""), ("limit", "null")),
        [Call("search", '{"code": "nul", "code": "None!", "code": "x = 1\\n", "code": "", "limit": "null"}')],
    ),
    "no type": (qwen(("other", "5")), [Call("search", '{"other": "5"}')]),
    "lines, quotes and tags in a text": (
        qwen(("q", 'if a < b:\n\n    say("\\n")\n</div></function>\n</param')),
        [Call("search", r'{"q": "if a < b:\n\n    say(\"\\n\")\n</div></function>\n</param"}')],
    ),
    "an empty value": (qwen(("q", ""), ("limit", "")), [Call("search", '{"q": "", "limit": ""}')]),
    "on one line": (
        "<tool_call><function=search><parameter=q>a</parameter><parameter=limit>2</parameter></function></tool_call>",
        [Call("search", '{"q": "a", "limit": 2}')],
    ),
    "no block": (QWEN_LOOK.removeprefix("<tool_call>\n"), [LOOK]),
    "no end of a value": (QWEN_LOOK.replace("\n</parameter>", ""), [LOOK]),
    "no end of the call": (QWEN_LOOK.replace("\n</function>", ""), [LOOK]),
    "no end at all": (QWEN_LOOK.removesuffix("\n</function>\n</tool_call>"), [LOOK]),
    "a call in a call": (
        "<tool_call>\n<function=search>\n<parameter=q>\na\n</parameter>\n<function=stop></function></tool_call>",
        [Call("search", '{"q": "a"}'), STOP],
    ),
    "text in a call": (
        "<tool_call>\n<function=search>\n<parameter=q>\na\n</parameter>\nwell </function></tool_call>.",
        [Call("search", '{"q": "a"}'), "well </function>."],
    ),
    "a long key": (f"<function=stop><parameter={'k' * 300}>", [STOP, f"<parameter={'k' * 300}>"]),
    "unknown tool": ("<tool_call>\n<function=rm>\n</function>\n</tool_call>", None),
    "no name": (
        f"<tool_call>\n<function=search\n</function>\n{QWEN_LOOK}",
        ["<tool_call>\n<function=search\n</function>\n", LOOK],
    ),
    "JSON": (f"<tool_call>\n{WEATHER}\n</tool_call>", None),
    "cut in a text": (QWEN_LOOK.partition(", NY")[0], [Call("get_weather", '{"location": "Brooklyn')]),
    "cut in a number": (qwen(("limit", "12")).partition("2")[0], [Call("search", '{"limit": 1')]),
    "cut in a key": (qwen(("q", "a"), ("limit", "1")).partition("mit")[0], [Call("search", '{"q": "a"}')]),
    "cut in a tag": (qwen(("q", "a")).partition("ameter>\n</f")[0], [Call("search", '{"q": "a\\n</par')]),
    "cut after the call": (QWEN_LOOK.removesuffix("call>"), [LOOK]),
    "a stray end": ("a </tool_call> b", None),
    "an empty block": ("<tool_call>\n</tool_call>", []),
    "cut in the opening": ("I look.\n<tool_call>\n<functio", ["I look.\n"]),
}
TABLES["qwen3_coder+inside"] = {
    "a call in the thought": (f"I look.\n{QWEN_LOOK}", [Thought("I look."), LOOK]),
}
GLM_LOOK = (
    "<tool_call>get_weather\n<arg_key>location</arg_key>\n<arg_value>Brooklyn, NY</arg_value>\n<arg_key>unit</arg_key>\n"
    "<arg_value>celsius</arg_value>\n</tool_call>"
)
TABLES["glm45"] = {
    "one": (GLM_LOOK, [LOOK]),
    "newer, without newlines": (GLM_LOOK.replace("\n", ""), [LOOK]),
    "two, with text": (f"\nI look.\n{GLM_LOOK}\n<tool_call>stop</tool_call>", ["\nI look.\n", LOOK, STOP]),
    "types": (
        "<tool_call>search\n<arg_key>q</arg_key>\n<arg_value>\n7\n</arg_value>\n<arg_key>limit</arg_key>\n<arg_value>7</arg_value>"
        "\n<arg_key>sites</arg_key>\n<arg_value>[]</arg_value>\n</tool_call>",
        [Call("search", '{"q": "\\n7\\n", "limit": 7, "sites": []}')],
    ),
    "no arguments": ("<tool_call>stop\n</tool_call>", [STOP]),
    "no end": (GLM_LOOK.removesuffix("\n</tool_call>"), [LOOK]),
    "no value": ("<tool_call>search<arg_key>q</arg_key>!</tool_call>", [STOP._replace(name="search"), "!"]),
    "unknown tool": ("<tool_call>rm\n</tool_call>", None),
    "cut in the name": ("<tool_call>sto", None),
    "an empty block": ("<tool_call>\n</tool_call>", []),
}
MINIMAX_LOOK = (
    '<invoke name="get_weather">\n<parameter name="location">Brooklyn, NY</parameter>\n<parameter name="unit">celsius'
    "</parameter>\n</invoke>\n"
)
TABLES["minimax_m2"] = {
    "one": (f"<minimax:tool_call>\n{MINIMAX_LOOK}</minimax:tool_call>", [LOOK]),
    "two in a block": (
        f'Yes.<minimax:tool_call>\n{MINIMAX_LOOK}<invoke name="stop">\n</invoke>\n</minimax:tool_call>',
        ["Yes.", LOOK, STOP],
    ),
    "newlines around a value": (
        '<minimax:tool_call><invoke name="search"><parameter name="q">\na\n</parameter></invoke></minimax:tool_call>',
        [Call("search", '{"q": "\\na\\n"}')],
    ),
    "unknown tool": ('<minimax:tool_call>\n<invoke name="rm">\n</invoke>\n</minimax:tool_call>', None),
}
HUNYUAN3_LOOK = GLM_LOOK.replace("weather\n", "weather<tool_sep>\n")
HUNYUAN3_SUFFIXED = re.sub(r"(</?[a-z_]+)>", r"\1:opensource>", f"<tool_calls>\n{HUNYUAN3_LOOK}\n</tool_calls>")
TABLES["hy_v3"] = {
    "suffix": (f"Yes. <b:opensource>{HUNYUAN3_SUFFIXED}", ["Yes. <b:opensource>", LOOK]),
    "half a suffix": ("<tool_calls:open", None),
    "one": (f"<tool_calls>\n{HUNYUAN3_LOOK}\n</tool_calls>", [LOOK]),
    "two, with text": (
        f"Yes.<tool_calls>{HUNYUAN3_LOOK}<tool_call>stop<tool_sep></tool_call></tool_calls> No.",
        ["Yes.", LOOK, STOP, " No."],
    ),
    "unknown tool": ("<tool_calls><tool_call>rm<tool_sep></tool_call></tool_calls>", None),
}
DSML_LOOK = """<｜DSML｜function_calls>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="location" string="true">Brooklyn, NY</｜DSML｜parameter>
<｜DSML｜parameter name="unit" string="true">celsius</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>"""


def dsml(*arguments: tuple[str, str]) -> str:
    """Return a call of `search` with arguments as they are written."""
    written = "".join(f"<｜DSML｜parameter name={name}>{value}</｜DSML｜parameter>" for name, value in arguments)
    return f'<｜DSML｜function_calls><｜DSML｜invoke name="search">{written}</｜DSML｜invoke></｜DSML｜function_calls>'


TABLES["deepseek_v32"] = {
    "one": (DSML_LOOK, [LOOK]),
    "two, with text": (
        DSML_LOOK.replace("</｜DSML｜invoke>", '</｜DSML｜invoke>\n<｜DSML｜invoke name="stop">\n</｜DSML｜invoke>')
        + "!",
        [LOOK, STOP, "!"],
    ),
    "types of the schema": (
        dsml(('"q" string="false"', "7"), ('"limit" string="true"', "07"), ('"page" string="false"', "null")),
        [Call("search", '{"q": "7", "limit": 7, "page": null}')],
    ),
    "no types in the schema": (
        dsml(('"a" string="true"', "7"), ('"b" string="false"', "[7]"), ('"c"', "7"), ('"d" string="false"', "x")),
        [Call("search", '{"a": "7", "b": [7], "c": 7, "d": "x"}')],
    ),
    "cut in a text": (DSML_LOOK.partition(", NY")[0], [Call("get_weather", '{"location": "Brooklyn')]),
    "unknown tool": (DSML_LOOK.replace("get_weather", "rm"), None),
    "cut in the opening": ("Yes.<｜DSML｜function_calls>\n<｜DSML｜invo", ["Yes."]),
}
TABLES["deepseek_v4"] = {"one": (DSML_LOOK.replace("function_calls", "tool_calls"), [LOOK])}


def nested(*arguments: str) -> str:
    """Return a call of `search` in the tags of MiniMax-M3; `[` stands for its token in front of a tag."""
    written = "".join(arguments).replace("[", "]<]minimax[>[")
    return f']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="search">{written}]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>'


NESTED_LOOK = nested("[<location>Brooklyn, NY[</location>\n[<unit>celsius[</unit>").replace('"search"', '"get_weather"')
TABLES["minimax_m3"] = {
    "one": (NESTED_LOOK, [LOOK]),
    "two, with text": (
        f'Yes.{NESTED_LOOK.removesuffix("]<]minimax[>[</tool_call>")}]<]minimax[>[<invoke name="stop">]<]minimax[>[</invoke>'
        "]<]minimax[>[</tool_call> No.",
        ["Yes.", LOOK, STOP, " No."],
    ),
    "types": (
        nested("[<q>7\n[</q>[<limit>07[</limit>[<deep>true[</deep>[<page>null[</page>"),
        [Call("search", '{"q": "7\\n", "limit": 7, "deep": true, "page": null}')],
    ),
    "an array and objects": (
        nested(
            "[<sites>[<item>1[</item>[<item>b[</item>[</sites>[<filter>[<a>x[</a>[<b>y[</b>[<b>[<c>z[</c>[</b>[</filter>"
        ),
        [Call("search", '{"sites": ["1", "b"], "filter": {"a": "x", "b": ["y", {"c": "z"}]}}')],
    ),
    "empty containers": (
        nested("[<sites>[</sites>[<filter>\n[</filter>[<q>[</q>"),
        [Call("search", '{"sites": [], "filter": {}, "q": ""}')],
    ),
    "no types in the schema": (
        nested("[<a>[<b>7[</b>[</a>[<c>7[</c>"),
        [Call("search", '{"a": {"b": "7"}, "c": "7"}')],
    ),
    "elements without ends": (
        nested("[<filter>[<a>x[<b>y[</filter>"),
        [Call("search", '{"filter": {"a": {"b": "y"}}}')],
    ),
    "no end": (NESTED_LOOK.partition("]<]minimax[>[</invoke>")[0], [LOOK]),
    "no end of the call": (NESTED_LOOK.replace("]<]minimax[>[</invoke>", ""), [LOOK]),
    "cut in a text": (NESTED_LOOK.partition(", NY")[0], [Call("get_weather", '{"location": "Brooklyn')]),
    "unknown tool": (NESTED_LOOK.replace("get_weather", "rm"), None),
}
TABLES["seed_oss"] = {"one": (QWEN_LOOK.replace("tool_call>", "seed:tool_call>"), [LOOK])}
