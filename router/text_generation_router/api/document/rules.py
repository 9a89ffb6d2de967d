"""The ranges that validation checks, written into the schemas of the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from text_generation_proto.parameters import Api
from text_generation_proto.values import SAMPLING_PARAMETERS
from text_generation_router.api.core.settings import Limits
from text_generation_router.api.http.caller import MAX_TIMEOUT_S

Json = dict[str, Any]


def document_rules(components: Mapping[str, Json], limits: Limits) -> None:
    """Add the ranges of its properties to each schema."""
    tgi = _tgi(limits)
    for name, rules in {
        "GenerateParameters": tgi,
        "VertexParameters": tgi,
        "GenerateBody": _INPUTS,
        "CompatGenerateBody": _INPUTS,
        "TextInstance": _INPUTS,
        "ChatBody": {**_openai(Api.CHAT), "messages": {"minItems": 1}},
        "CompletionBody": _openai(Api.COMPLETIONS),
    }.items():
        properties = components.get(name, {}).get("properties", {})
        for key, rule in rules.items():
            if key in properties:
                properties[key] |= rule
    for name in components.keys() - _UNCHECKED:
        properties = components[name].get("properties", {})
        for key in _TIMEOUTS & properties.keys():
            properties[key] |= {"exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S}


_TIMEOUTS = {"queue_timeout", "timeout"}
_UNCHECKED = {"InputsBody", "UnjudgedParameters", "ChatTokenizeBody"}
"""Bodies of routes that only count tokens: just their types are checked."""
_INPUTS: Json = {"inputs": {"minLength": 1}}


def _tgi(limits: Limits) -> Json:
    """Return rules 0 to 13, as far as they concern one parameter alone."""
    return _ranges(Api.TGI) | {
        "best_of": {"maximum": limits.max_best_of},
        "max_new_tokens": {"minimum": 1},
        "stop": {"maxItems": limits.max_stop_sequences},
        "top_n_tokens": {"maximum": limits.max_top_n_tokens},
        "truncate": {"minimum": 1, "maximum": limits.max_input_tokens},
    }


def _openai(api: Api) -> Json:
    """Return the ranges that hold in every body. Parameters of the draw are ignored at temperature 0."""
    return _ranges(api, samples=False) | {"temperature": {"minimum": 0}}


def _ranges(api: Api, *, samples: bool = True) -> Json:
    return {
        parameter.names[api]: parameter.range.json_schema
        for parameter in SAMPLING_PARAMETERS
        if api in parameter.names and parameter.range is not None and (samples or not parameter.samples)
    }
