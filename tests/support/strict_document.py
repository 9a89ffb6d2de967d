"""The OpenAPI document with every rule that validation checks, so that all that a fuzzer makes from it is accepted.

Where a rule concerns 32-bit numbers, token ids or deadlines, these schemas promise a little less than the server takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from text_generation_proto.parameters import Api, Range
from text_generation_proto.values import LOGIT_BIAS, MAX_LOGIT_BIAS, SAMPLING_PARAMETERS
from text_generation_router.api.core.parameters import MAX_STOP_TOKENS, MIN_REPETITION_PENALTY
from text_generation_router.api.core.settings import Limits
from text_generation_router.api.http.bodies import MAX_NAME
from text_generation_router.api.openai.responses_schemas import HOSTED

Json = dict[str, Any]

PROMISED_S = 60
"""Shortest timeout with which no request expires."""
LONGEST_S = 86_400
SMALLEST, NEAR_ONE = 1.2e-38, 0.9999999
"""A 32-bit number above 0, and one below 1: smaller and larger ones are rounded to 0 and 1."""
NULL: Json = {"type": "null"}
WORD: Json = {"type": "string", "maxLength": MAX_NAME}
OBJECT: Json = {"type": "object"}
REGEX: Json = {"type": "string", "format": "regex"}
SOME: Json = {"minItems": 1}
POSITIVE: Json = {"minimum": 1}
SOME_TEXT: Json = {"minLength": 1, "pattern": "[^\\x00-\\x1f\\x7f-\\x9f]"}
"""A text with a character that is not a control character: a tokenizer may drop those, and no prompt may be empty."""


def form(kind: str, **fields: object) -> Json:
    """The schema of an object with this `type` and these fields."""
    return {"type": "object", "properties": {"type": {"const": kind}, **fields}, "required": ["type", *fields]}


def words(*known: str | None) -> Json:
    return {"enum": [*known]}


def _message(roles: list[str], block: Json) -> Json:
    content = {"anyOf": [{"type": "string"}, {"type": "array", "items": block, "minItems": 1}]}
    return {"properties": {"role": {"enum": roles}, "content": content}}


_PROPERTIES: Json = {
    "type": "object",
    "properties": {"properties": {"type": "object", "additionalProperties": OBJECT}},
    "required": ["properties"],
}
_WITH_SCHEMA: Json = {"type": "object", "properties": {"schema": OBJECT}, "required": ["schema"]}
_TEXT_PART = form("text", text={"type": "string"})
_GRAMMAR = {
    "anyOf": [
        form("json", value=_PROPERTIES),
        form("json_object", value=_PROPERTIES),
        form("json_schema", value={"type": "object", "properties": {"schema": _PROPERTIES}, "required": ["schema"]}),
        form("regex", value=REGEX),
    ]
}
_RESPONSE_FORMAT = {
    "anyOf": [
        form("text"),
        form("json_object"),
        form("json_schema", json_schema=_WITH_SCHEMA),
        form("regex", value=REGEX),
    ]
}
_CHOICES: Json = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_STRUCTURED = {
    "type": "object",
    "anyOf": [
        {"properties": {name: rule}, "required": [name]}
        for name, rule in {"json": OBJECT, "regex": REGEX, "choice": _CHOICES, "json_object": {"const": True}}.items()
    ],
    "maxProperties": 1,
}
_ONE_CONSTRAINT = {
    "anyOf": [{"properties": {"response_format": False}}, {"properties": {"structured_outputs": False}}],
}
_STREAMED: Json = {
    "properties": {"parameters": {"properties": {"best_of": words(None), "decoder_input_details": {"const": False}}}}
}
_TOOL = [form("function", name={**WORD, "minLength": 1}), {"properties": {"type": words(*HOSTED)}}]
_MESSAGE_FORMAT = form("json_schema", schema=OBJECT)
_FIELDS: dict[str, Json] = {
    "GenerateParameters": {"grammar": _GRAMMAR},
    "VertexParameters": {"grammar": _GRAMMAR},
    "ChatBody": {"response_format": _RESPONSE_FORMAT, "structured_outputs": _STRUCTURED},
    "CompletionBody": {"response_format": _RESPONSE_FORMAT, "structured_outputs": _STRUCTURED, "best_of": words(1)},
    "ToolDefinition": {"type": words("function")},
    "ResponsesBody": {"include": {"type": "array", "items": words("message.output_text.logprobs")}},
    "TextOptions": {"format": {"anyOf": [form("text"), form("json_object"), form("json_schema", schema=OBJECT)]}},
    "OutputConfig": {"format": _MESSAGE_FORMAT},
    "CountTokensBody": {"output_format": _MESSAGE_FORMAT},
    "MessagesBody": {"output_format": _MESSAGE_FORMAT},
    "ClientTool": {"type": words("custom")},
    "ToolUseChoice": {"type": words("auto", "none")},
    "Thinking": {"type": words("enabled", "disabled", "adaptive")},
}
"""Schemas that replace those of fields, by the names of bodies and parts."""
_NO_FORCED: Json = {"properties": {"tool_choice": words("auto", "none"), "function_call": words("auto", "none")}}
_NO_TOOLS_TWICE: Json = {"not": {"required": ["tools", "functions"]}}
_WHOLE: dict[str, Json] = {
    "GenerateParameters": {
        "anyOf": [
            {"properties": {"best_of": words(1)}},
            {"properties": {"do_sample": {"const": True}, "seed": False}, "required": ["do_sample"]},
        ]
    },
    "CompatGenerateBody": {"anyOf": [{"properties": {"stream": {"const": False}}}, _STREAMED]},
    "ContentPart": _TEXT_PART,
    "TextBlock": _TEXT_PART,
    "ClientTool": {"required": ["name", "input_schema"]},
    "InputMessage": {
        "anyOf": [
            _message(
                ["assistant"],
                {
                    "anyOf": [
                        _TEXT_PART,
                        {"properties": {"type": words("thinking", "redacted_thinking")}, "required": ["type"]},
                        form("tool_use", id=WORD, name=WORD),
                    ]
                },
            ),
            _message(["user", "system"], {"anyOf": [_TEXT_PART, form("tool_result", tool_use_id=WORD)]}),
        ]
    },
    "InputItem": {
        "anyOf": [
            {
                "properties": {"type": words("message"), "role": words("user", "assistant", "system", "developer")},
                "required": ["role"],
            },
            form("function_call", call_id=WORD, name=WORD),
            form("function_call_output", call_id=WORD),
            form("reasoning"),
        ]
    },
    "FunctionTool": {"anyOf": _TOOL},
    "AnyTool": {"anyOf": [*_TOOL, form("namespace", name=WORD)]},
    "InferBody": {
        "anyOf": [
            {"properties": {"outputs": False}},
            {"properties": {name: {"minItems": 1, "maxItems": 1} for name in ("inputs", "outputs")}},
        ]
    },
    "BadWords": {"items": {"type": "string", "pattern": "\\S", "maxLength": 64}},
    "Bytes": {"items": {"type": "integer", "minimum": 33, "maximum": 126}, "minItems": 1},
    "Strings": {"items": SOME_TEXT | {"type": "string"}, "minItems": 1},
    "PromptTexts": {"items": SOME_TEXT | {"type": "string"}, "minItems": 1, "maxItems": 4},
    "PromptIds": {"minItems": 1, "maxItems": 4},
    "InputItems": SOME | {"contains": {"properties": {"type": words("message", "function_call")}}},
    "ChatTokenizeBody": _NO_TOOLS_TWICE,
}
"""Keywords that are added to the schemas of bodies and parts."""


def strict(document: Json, limits: Limits, *, generations: int) -> Json:
    """Return the document with the rules; `generations`: the most that one request may ask for."""
    document = deepcopy(document)
    components: dict[str, Json] = document["components"]["schemas"]
    for name in _FIELDS:
        components[name]["properties"] |= _FIELDS[name]
    for name in _WHOLE:
        components[name] |= _WHOLE[name]
    ids = {"items": {"type": "integer", "minimum": 0, "maximum": limits.vocab_size - 1}}
    for name in ("TokenIds", "AllowedTokenIds"):
        components[name] |= ids | SOME
    components["StopTokenIds"] |= ids | {"maxItems": MAX_STOP_TOKENS}
    components["StopTexts"] |= {"maxItems": limits.max_stop_sequences}
    components["Biases"] |= {
        "maxProperties": MAX_LOGIT_BIAS,
        "propertyNames": {"pattern": f"^[0-9]{{1,{len(str(limits.vocab_size)) - 1}}}$"},
        "additionalProperties": {"type": "number", **_documented(LOGIT_BIAS)},
    }
    for name, rules in _ranges_of_bodies(limits, min(128, generations)).items():
        properties = components[name]["properties"]
        for key in rules.keys() & properties.keys():
            properties[key] |= rules[key]
    rules = [_ONE_CONSTRAINT, _combinations(limits)]
    components["ChatBody"] |= {"allOf": [*rules, _NO_FORCED], **_NO_TOOLS_TWICE}
    many = {"properties": {"prompt": {"type": "string"}, "echo": {"const": False}}}
    components["CompletionBody"]["allOf"] = [*rules, {"anyOf": [{"properties": {"n": {"const": 1}}}, many]}]
    components["ResponsesBody"]["allOf"] = [{"properties": {"tool_choice": words("auto", "none")}}]
    document["components"]["schemas"] = {name: _bounded(schema) for name, schema in components.items()}
    for header in document["components"]["parameters"].values():
        if header["schema"].get("minimum"):
            header["schema"]["minimum"] = PROMISED_S * 1000
        if header["name"] == "grpc-timeout":
            header["schema"]["pattern"] = "^[1-9][0-9]{2,6}S$|^[1-9][0-9]{0,2}[HM]$"
    describe_events(document)
    stream = document["paths"]["/generate_stream"]["post"]["requestBody"]["content"]["application/json"]
    stream["schema"] = {"allOf": [stream["schema"], _STREAMED]}
    return document


def describe_events(document: Json) -> None:
    """Let the schema of a stream be that of one event: schemathesis reads one at a time."""
    for operation in (operation for methods in document["paths"].values() for operation in methods.values()):
        content = operation["responses"]["200"].get("content", {})
        if (media := content.get("text/event-stream")) is not None:
            data = {"type": "string", "contentMediaType": "application/json", **media["schema"]}
            event = {"type": "object", "properties": {"event": {"type": "string"}, "data": data}, "required": ["data"]}
            media["schema"] = event


def _bounded(schema: Json) -> Json:
    """Add the ranges of integers and of timeouts to the fields of a schema."""
    for name, field in schema.get("properties", {}).items():
        if name in ("queue_timeout", "timeout"):
            field |= {"minimum": PROMISED_S, "maximum": LONGEST_S}
        if field.get("type") == "integer":
            field.setdefault("minimum", -(2**31))
            field.setdefault("maximum", 2**31 - 1)
        if field.get("type") == "number":
            field.setdefault("minimum", -3e38)
            field.setdefault("maximum", 3e38)
    return schema


def _ranges_of_bodies(limits: Limits, choices: int) -> Mapping[str, Json]:
    texts = {"inputs": SOME_TEXT}
    tgi = _ranges(Api.TGI) | {
        "best_of": {"minimum": 1, "maximum": limits.max_best_of},
        "max_new_tokens": POSITIVE,
        "stop": {"maxItems": limits.max_stop_sequences},
        "top_n_tokens": {"maximum": limits.max_top_n_tokens},
        "truncate": {"minimum": 1, "maximum": limits.max_input_tokens},
    }
    tops = {"maximum": limits.max_top_logprobs}
    openai = {
        "n": {"maximum": choices},
        "max_tokens": POSITIVE,
        "max_completion_tokens": POSITIVE,
        "top_logprobs": tops,
        "prompt_logprobs": tops,
        "truncate_prompt_tokens": {"maximum": limits.max_input_tokens},
    }
    return {
        "GenerateParameters": tgi,
        "VertexParameters": tgi,
        "GenerateBody": texts,
        "CompatGenerateBody": texts,
        "TextInstance": texts,
        "ChatBody": _ranges(Api.CHAT) | openai | {"messages": SOME},
        "ChatTokenizeBody": {"messages": SOME},
        "CompletionBody": _ranges(Api.COMPLETIONS) | openai | {"logprobs": tops, "prompt": SOME_TEXT},
        "ResponsesBody": _ranges(Api.RESPONSES) | {"max_output_tokens": POSITIVE, "top_logprobs": tops},
        "MessagesBody": _ranges(Api.MESSAGES) | {"max_tokens": POSITIVE, "messages": SOME},
        "CountTokensBody": {"messages": SOME},
        "VertexBody": {"instances": SOME},
        "DetokenizeBody": {"ids": {"items": {"type": "integer", "minimum": 0, "maximum": limits.vocab_size - 1}}},
    }


def _combinations(limits: Limits) -> Json:
    """Return the rules that `min_tokens` is at most `max_tokens`, and that streams have no `prompt_logprobs`.

    No schema compares two numbers: it promises less. It has few branches, because tools multiply those of all rules.
    """
    most = limits.max_total_tokens
    longest = {name: {"minimum": most} for name in ("max_tokens", "max_completion_tokens")}
    short, plain = {"min_tokens": {"maximum": 1}}, {"prompt_logprobs": False}
    whole = {"stream": {"const": False}}
    return {
        "anyOf": [
            {"properties": properties}
            for properties in (short | plain, short | whole, {"min_tokens": {"maximum": most}} | longest | plain)
        ]
    }


def _ranges(api: Api) -> Json:
    """Return the ranges of the sampling parameters."""
    rules: Json = {}
    for parameter in SAMPLING_PARAMETERS:
        allowed = parameter.allowed(api)
        if (name := parameter.names.get(api)) is None or allowed is None:
            continue
        rules[name] = _documented(allowed)
        if parameter.field == "repetition_penalty":
            rules[name]["minimum"] = MIN_REPETITION_PENALTY * 1.01
    return rules


def _documented(values: Range) -> Json:
    """Return a range as keywords of JSON schema, without the numbers that are rounded to an excluded end."""
    ends = values.json_schema
    if "exclusiveMinimum" in ends:
        return {"minimum": SMALLEST} | ({"maximum": NEAR_ONE} if "exclusiveMaximum" in ends else {})
    return dict(ends)
