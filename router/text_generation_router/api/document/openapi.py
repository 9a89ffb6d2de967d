"""The OpenAPI 3.1 document, made from the table of routes and the types of their bodies."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import cache
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from text_generation_router.api.document.parameters import CALLER_HEADERS
from text_generation_router.api.http.bodies import JSON
from text_generation_router.api.http.dialects import ANTHROPIC_VERSION, ERROR_ANSWERS, Dialect, error_answer, status_of
from text_generation_router.api.http.routes import Route
from text_generation_router.error_attributes import Operation, TgiBody
from text_generation_router.errors import MAX_RETRY_AFTER_S, ServingError, Unauthorized

Json = dict[str, Any]

_TEXT = "text/plain"
_EVENTS = "text/event-stream"
_SCHEMAS = "#/components/schemas/{model}"
_SECURITY: Json = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_HEADERS: Json = {
    "x-request-id": {
        "description": "The id from the request, or a new one.",
        "schema": {"type": "string", "maxLength": 128},
    }
}
_RETRY_AFTER = "Retry-After"
_OWN_HEADERS: Json = {
    _RETRY_AFTER: {
        "description": "Seconds after which to retry.",
        "schema": {"type": "integer", "minimum": 1, "maximum": int(MAX_RETRY_AFTER_S)},
    }
}
"""Headers of some responses only."""
_ANTHROPIC_VERSION: Json = {
    "name": ANTHROPIC_VERSION,
    "in": "header",
    "required": False,
    "description": "Its presence asks for Anthropic's form of the response.",
    "schema": {"type": "string"},
}
_VARIABLE = re.compile(r"\{(\w+)(?::[^{}]*)?\}")
_NAME = r"\1"
_NO_WORD = re.compile(r"\W+")


def document(table: Iterable[Route], version: str, *, keys: bool, rules: Callable[[Json], None] | None = None) -> Json:
    """The document of the routes in `table`; `keys`: routes other than probes require an API key.

    `rules` adds those of the server's settings to the schemas.
    """
    routes = [route for route in table if route.documented]
    schemas, components = _schemas(routes)
    if rules is not None:
        rules(components)
    paths: dict[str, Json] = {}
    for route in routes:
        path = _VARIABLE.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(
            route, schemas, needs_key=keys and not route.probe
        )
    result: Json = {
        "openapi": "3.1.0",
        "info": {
            "title": "Text Generation Inference",
            "version": version,
            "license": {"name": "Apache 2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        "tags": [{"name": tag} for tag in dict.fromkeys(route.tag for route in routes if route.tag)],
        "paths": paths,
        "components": {"schemas": components, "headers": _HEADERS | _OWN_HEADERS, "parameters": CALLER_HEADERS},
    }
    if keys:
        result["components"]["securitySchemes"] = _SECURITY
        result["security"] = [{name: []} for name in _SECURITY]
    return result


class _Schemas:
    """The schemas of the types that routes name."""

    def __init__(self, schemas: Mapping[tuple[str, JsonSchemaMode], Json]) -> None:
        self._schemas = schemas

    def request(self, model: object) -> Json:
        return self._schemas[repr(model), "validation"]

    def response(self, model: object) -> Json:
        return self._schemas[repr(model), "serialization"]


def _schemas(routes: Sequence[Route]) -> tuple[_Schemas, Json]:
    taken = dict.fromkeys(route.body for route in routes if route.body is not None)
    answered = dict.fromkeys(ERROR_ANSWERS.values())
    for route in routes:
        answered |= dict.fromkeys(model for model in (route.answer, route.events) if model is not None)
    schemas, definitions = _schemas_of(tuple(taken), tuple(answered))
    # The caller adds the limits of its server.
    return _Schemas(schemas), deepcopy(definitions)


@cache
def _schemas_of(
    taken: tuple[Any, ...], answered: tuple[Any, ...]
) -> tuple[Mapping[tuple[str, JsonSchemaMode], Json], Json]:
    """Return the schemas of the bodies and answers. Reading the docstrings of their fields takes 0.2 s."""
    inputs: list[tuple[str, JsonSchemaMode, TypeAdapter[Any]]] = [
        *((repr(model), "validation", TypeAdapter(model)) for model in taken),
        *((repr(model), "serialization", TypeAdapter(model)) for model in answered),
    ]
    schemas, definitions = TypeAdapter.json_schemas(inputs, ref_template=_SCHEMAS)
    return schemas, definitions.get("$defs", {})


def _operation(route: Route, schemas: _Schemas, *, needs_key: bool) -> Json:
    operation: Json = {
        "operationId": _NO_WORD.sub("_", f"{route.method}{_VARIABLE.sub(_NAME, route.path)}".lower()).rstrip("_"),
        "summary": _summary(route),
        "responses": {str(status): answer for status, answer in sorted(_responses(route, schemas, needs_key).items())},
    }
    if route.tag:
        operation["tags"] = [route.tag]
    if parameters := _parameters(route):
        operation["parameters"] = parameters
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schemas.request(route.body)}}}
    if not needs_key:
        operation["security"] = []
    return operation


def _parameters(route: Route) -> list[Json]:
    """The variables of the path and, for routes that generate, the request headers."""
    variables: list[Json] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _VARIABLE.findall(route.path)
    ]
    headers = CALLER_HEADERS if Operation.GENERATE in route.operations else ()
    if set(route.dialects) >= {Dialect.OPENAI, Dialect.ANTHROPIC}:
        variables.append(_ANTHROPIC_VERSION)
    return [*variables, *({"$ref": f"#/components/parameters/{name}"} for name in headers)]


def _summary(route: Route) -> str:
    """The first line of the handler's docstring, without the path before it."""
    first = (route.handler.__doc__ or "").partition("\n")[0]
    text = first.partition(": ")[2] if re.match(r"[A-Z]+ \S", first) and ": " in first else first
    return text[:1].upper() + text[1:]


def _responses(route: Route, schemas: _Schemas, needs_key: bool) -> dict[int, Json]:  # noqa: FBT001 - one caller
    responses: dict[int, Json] = {200: _good(route, schemas)}
    for dialect in route.dialects:
        schema = schemas.response(ERROR_ANSWERS[dialect])
        for error in (*route.errors, *((Unauthorized,) if needs_key else ())):
            _add_error(responses, dialect, error, schema)
    return responses


def _good(route: Route, schemas: _Schemas) -> Json:
    response = _response(
        "Server-sent events." if route.answer is None and route.events is not None else "The response."
    )
    content: Json = {}
    if route.answer is not None:
        content[route.content_type] = {"schema": schemas.response(route.answer)}
    if route.events is not None:
        data = {"type": "string", "contentMediaType": JSON, "contentSchema": schemas.response(route.events)}
        content[_EVENTS] = {
            "schema": {
                "type": "object",
                "description": "One of the server-sent events.",
                "properties": {"event": {"type": "string"}, "data": data},
                "required": ["data"],
            }
        }
    if content:
        response["content"] = content
    return response


def _add_error(responses: dict[int, Json], dialect: Dialect, error: type[ServingError], schema: Json) -> None:
    text = (error.__doc__ or "").partition("\n")[0]
    status = status_of(dialect, error)
    known = responses.get(status)
    response = responses[status] = known or _response(text)
    if known is not None and text not in known["description"]:
        known["description"] += " " + text
    example = error()
    if example.retry_after is not None:
        response["headers"][_RETRY_AFTER] = {"$ref": f"#/components/headers/{_RETRY_AFTER}"}
    if dialect is Dialect.TGI and error.tgi_body is not TgiBody.JSON:
        if error.tgi_body is TgiBody.TEXT:
            response.setdefault("content", {})[_TEXT] = {"schema": {"type": "string"}}
        return
    examples = _add_schema(response, schema).setdefault("examples", {})
    name = error.error_type if error.error_type not in examples else f"{error.error_type} ({dialect.value})"
    examples[name] = {"value": error_answer(dialect, example)}


def _add_schema(response: Json, schema: Json) -> Json:
    """Add a schema to those of the JSON body; return the description of that body."""
    media: Json = response.setdefault("content", {}).setdefault(JSON, {"schema": schema})
    known = media["schema"].get("anyOf", [media["schema"]])
    if schema not in known:
        media["schema"] = {"anyOf": [*known, schema]}
    return media


def _response(description: str) -> Json:
    return {
        "description": description,
        "headers": {name: {"$ref": f"#/components/headers/{name}"} for name in _HEADERS},
    }
