"""What validation judges beyond types, written into the schemas of the OpenAPI document: clients can see it coming."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from text_generation_router.api.core.settings import Limits
from text_generation_router.api.http.caller import MAX_TIMEOUT_S

Json = dict[str, Any]


def document_rules(components: Mapping[str, Json], limits: Limits) -> None:
    """Add to each schema that has them the rules of its properties."""
    parameters = _parameters(limits)
    openai = _openai()
    for name, rules in {
        "GenerateParameters": parameters,
        "VertexParameters": parameters,
        "GenerateBody": _INPUTS,
        "CompatGenerateBody": _INPUTS,
        "TextInstance": _INPUTS,
        "ChatBody": {**openai, "messages": {"minItems": 1}},
        "CompletionBody": openai,
    }.items():
        properties = components.get(name, {}).get("properties", {})
        for key, rule in rules.items():
            if key in properties:
                properties[key] |= rule
    for name in components.keys() - _UNJUDGED:
        properties = components[name].get("properties", {})
        for key in _TIMEOUTS & properties.keys():
            properties[key] |= {"exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S}


_TIMEOUTS = {"queue_timeout", "timeout"}
_UNJUDGED = {"InputsBody", "UnjudgedParameters", "ChatTokenizeBody"}
"""Of what only counts tokens: types are all that is looked at."""
_INPUTS: Json = {"inputs": {"minLength": 1}}


def _parameters(limits: Limits) -> Json:
    """Rules 0 to 15 of validation.py, as far as they concern one parameter alone."""
    share = {"exclusiveMinimum": 0, "exclusiveMaximum": 1}
    return {
        "best_of": {"maximum": limits.max_best_of},
        "temperature": {"exclusiveMinimum": 0},
        "repetition_penalty": {"exclusiveMinimum": 0},
        "frequency_penalty": {"minimum": -2, "maximum": 2},
        "top_p": share,
        "typical_p": share,
        "top_k": {"minimum": 1},
        "max_new_tokens": {"minimum": 1},
        "stop": {"maxItems": limits.max_stop_sequences},
        "top_n_tokens": {"maximum": limits.max_top_n_tokens},
        "truncate": {"minimum": 1, "maximum": limits.max_input_tokens},
    }


def _openai() -> Json:
    """What is refused whatever else a body has: a `top_p` past 1 is idle, and so is one where nothing is sampled."""
    return {
        "temperature": {"minimum": 0},
        "frequency_penalty": {"minimum": -2, "maximum": 2},
        "presence_penalty": {"minimum": -2, "maximum": 2},
    }
