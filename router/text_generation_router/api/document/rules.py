"""The rules that validation checks, written into the schemas of the OpenAPI document: ranges, lengths, numbers of entries.

The forms of nested values are beside their fields. Where a rule concerns 32-bit numbers or token ids, the document promises
a little less than the server takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from text_generation_proto.parameters import Api, Range
from text_generation_proto.values import LOGIT_BIAS, MAX_LOGIT_BIAS, SAMPLING_PARAMETERS
from text_generation_router.api.core.parameters import MAX_STOP_TOKENS, MIN_REPETITION_PENALTY
from text_generation_router.api.core.settings import Limits
from text_generation_router.api.document.parameters import PROMISED_S
from text_generation_router.api.http.caller import MAX_TIMEOUT_S

Json = dict[str, Any]

SMALLEST, NEAR_ONE = 1.2e-38, 0.9999999
"""A 32-bit number above 0, and one below 1: smaller and larger ones are rounded to 0 and 1."""
_TIMEOUTS = {"queue_timeout", "timeout"}
_UNCHECKED = {"InputsBody", "UnjudgedParameters", "ChatTokenizeBody"}
"""Bodies of routes that only count tokens: just their types are checked."""
_ITEM_TYPES = ("message", "function_call", "function_call_output")
"""Items of an input that are more than reasoning."""
_SOME_TEXT: Json = {"minLength": 1, "pattern": "[^\\x00-\\x1f\\x7f-\\x9f]"}
"""A text with a character that is no control character: a tokenizer may drop those, and no prompt may be empty."""
_SOME: Json = {"minItems": 1}
_GIVEN: Json = {"type": "array", **_SOME}
_FUNCTIONS: Json = {
    "not": {"required": ["tools", "functions"], "properties": {"tools": _GIVEN, "functions": _GIVEN}},
}
"""The field that came before tools excludes these."""


def document_rules(components: Mapping[str, Json], limits: Limits, *, prompts: int, generations: int) -> None:
    """Add the rules to the schemas.

    `prompts`: the limit of prompts of a completion; `generations`: that of the generations of a request.
    """
    tgi, texts = _tgi(limits), {"inputs": _SOME_TEXT}
    choices = {"n": {"maximum": min(128, generations)}}
    for name, rules in {
        "GenerateParameters": tgi,
        "VertexParameters": tgi,
        "GenerateBody": texts,
        "StreamBody": texts,
        "CompatGenerateBody": texts,
        "TextInstance": texts,
        "ChatBody": _openai(Api.CHAT, limits) | choices | {"messages": _SOME},
        "ChatTokenizeBody": {"messages": _SOME},
        "CompletionBody": _openai(Api.COMPLETIONS, limits)
        | choices
        | {"logprobs": {"maximum": limits.max_top_logprobs}, "prompt": _SOME_TEXT},
        "ResponsesBody": _ranges(Api.RESPONSES)
        | {
            "max_output_tokens": _POSITIVE,
            "top_logprobs": {"maximum": limits.max_top_logprobs},
        },
        "MessagesBody": _ranges(Api.MESSAGES) | {"max_tokens": _POSITIVE, "messages": _SOME},
        "CountTokensBody": {"messages": _SOME},
        "VertexBody": {"instances": _SOME},
        "DetokenizeBody": {"ids": _token_ids(limits)},
    }.items():
        properties = components.get(name, {}).get("properties", {})
        for key, rule in rules.items():
            if key in properties:
                properties[key] |= rule
    for name in components.keys() - _UNCHECKED:
        properties = components[name].get("properties", {})
        for key in _TIMEOUTS & properties.keys():
            properties[key] |= {"minimum": PROMISED_S, "maximum": MAX_TIMEOUT_S}
    for name, rule in _lists(limits, prompts).items():
        if name in components:
            components[name] |= rule
    for name in components.keys() & {"ChatBody", "CompletionBody"}:
        components[name].setdefault("allOf", []).append(_combinations(limits))


_POSITIVE: Json = {"minimum": 1}


def _combinations(limits: Limits) -> Json:
    """Return the rules that `min_tokens` is at most `max_tokens`, and that streams have no `prompt_logprobs`.

    No schema compares two numbers: it promises less. It has few branches, because tools multiply those of all rules.
    """
    most = limits.max_total_tokens
    longest = {name: {"minimum": most} for name in ("max_tokens", "max_completion_tokens")}
    short, plain = {"min_tokens": {"maximum": 1}}, {"prompt_logprobs": {"type": "null"}}
    whole = {"stream": {"enum": [None, False]}}
    return {
        "anyOf": [
            {"properties": properties}
            for properties in (short | plain, short | whole, {"min_tokens": {"maximum": most}} | longest | plain)
        ]
    }


def _token_ids(limits: Limits) -> Json:
    return {"items": {"type": "integer", "minimum": 0, "maximum": limits.vocab_size - 1}}


def _lists(limits: Limits, prompts: int) -> dict[str, Json]:
    """Return the rules of whole bodies, and of lists and maps that have a name."""
    ids = _token_ids(limits)
    return {
        "StopTexts": {"maxItems": limits.max_stop_sequences},
        "StopTokenIds": ids | {"maxItems": MAX_STOP_TOKENS},
        "TokenIds": ids | _SOME,
        "AllowedTokenIds": ids | _SOME,
        "PromptTexts": {"minItems": 1, "maxItems": prompts, "items": {"type": "string", **_SOME_TEXT}},
        "PromptIds": {"minItems": 1, "maxItems": prompts},
        "Biases": {
            "maxProperties": MAX_LOGIT_BIAS,
            "propertyNames": {"pattern": f"^[0-9]{{1,{len(str(limits.vocab_size)) - 1}}}$"},
            "additionalProperties": {"type": "number", **_documented(LOGIT_BIAS)},
        },
        "InputItems": _SOME | {"contains": {"properties": {"type": {"enum": [None, *_ITEM_TYPES]}}}},
        "Bytes": {"contains": {"minimum": 33, "maximum": 126}},
        "Strings": {"items": _SOME_TEXT | {"type": "string"}, "minItems": 1},
        "ChatBody": _FUNCTIONS,
        "ChatTokenizeBody": _FUNCTIONS,
    }


def _tgi(limits: Limits) -> Json:
    """Return rules 0 to 13, as far as they concern one parameter alone."""
    return _ranges(Api.TGI) | {
        "best_of": {"minimum": 1, "maximum": limits.max_best_of},
        "max_new_tokens": _POSITIVE,
        "stop": {"maxItems": limits.max_stop_sequences},
        "top_n_tokens": {"maximum": limits.max_top_n_tokens},
        "truncate": {"minimum": 1, "maximum": limits.max_input_tokens},
    }


def _openai(api: Api, limits: Limits) -> Json:
    return _ranges(api) | {
        "max_tokens": _POSITIVE,
        "max_completion_tokens": _POSITIVE,
        "top_logprobs": {"maximum": limits.max_top_logprobs},
        "prompt_logprobs": {"maximum": limits.max_top_logprobs},
        "truncate_prompt_tokens": {"maximum": limits.max_input_tokens},
    }


def _ranges(api: Api) -> Json:
    """Return the ranges of the sampling parameters. OpenAI's and Anthropic's have values that mean "off"."""
    rules: Json = {}
    for parameter in SAMPLING_PARAMETERS:
        name = parameter.names.get(api)
        if name is None or parameter.range is None:
            continue
        rule = _documented(parameter.range)
        if api is not Api.TGI:
            if parameter.off is not None:
                rule |= _joined(rule, _documented(parameter.off))
            if parameter.field == "temperature":
                rule["minimum"] = 0
        if parameter.field == "repetition_penalty":
            rule["minimum"] = MIN_REPETITION_PENALTY * 1.01
        rules[name] = rule
    return rules


def _documented(values: Range) -> Json:
    """Return a range as keywords of JSON schema, without the numbers that are rounded to an excluded end."""
    ends = values.json_schema
    if "exclusiveMinimum" in ends:
        return {"minimum": SMALLEST} | ({"maximum": NEAR_ONE} if "exclusiveMaximum" in ends else {})
    return ends


def _joined(first: Json, second: Json) -> Json:
    """Return the ends of two ranges that touch."""
    joined: Json = {"minimum": min(first["minimum"], second["minimum"])}
    if "maximum" in first:
        joined["maximum"] = max(first["maximum"], second.get("maximum", first["maximum"]))
    return joined
