"""The OpenAPI 3.1 document, made from the table of routes and the types of their bodies."""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from inspect import getdoc
from typing import Any

import orjson
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode
from pydantic_core import core_schema

from text_generation_proto.parameters import Api
from text_generation_proto.values import SAMPLING_PARAMETERS
from text_generation_router.api.http import caller
from text_generation_router.api.http.dialects import ANTHROPIC_VERSION, ERROR_ANSWERS, Dialect, error_answer, status_of
from text_generation_router.api.http.keys import LONGEST_TENANT, TENANT
from text_generation_router.api.http.routes import Route
from text_generation_router.error_attributes import Operation, TgiBody
from text_generation_router.errors import MAX_RETRY_AFTER_S, ServingError, Unauthorized
from text_generation_router.request import Priority
from text_generation_router.web.bodies import JSON

Json = dict[str, Any]

_EXAMPLES: Json = orjson.loads((files("text_generation_router") / "api" / "document" / "examples.json").read_bytes())
"""Examples of request bodies by operation id: small, with a bounded answer. Most are README's."""
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
_TIMEOUT = {"type": "integer", "minimum": 1, "maximum": int(caller.MAX_TIMEOUT_S * 1e3)}
_TENANT = {"type": "string", "maxLength": LONGEST_TENANT, "pattern": "^[ -~]*$"}


def _header(name: str, description: str, schema: Json) -> Json:
    return {"name": name, "in": "header", "required": False, "description": description, "schema": schema}


_ASKS = "Its presence asks for Anthropic's form of the response."
_ANTHROPIC_VERSION = _header(ANTHROPIC_VERSION, _ASKS, {"type": "string"})
CALLER_HEADERS: Json = {
    header["name"]: header
    for header in (
        _header(TENANT[0], "The tenant of the request; used if callers have no keys of their own.", _TENANT),
        _header(TENANT[1], "The older name of the tenant header.", _TENANT),
        _header(
            caller.PRIORITY,
            "The priority of the request; wins over the body's.",
            {"type": "string", "enum": [priority.name.lower() for priority in Priority]},
        ),
        _header(caller.FIRST_TOKEN[0], "Milliseconds until the first token is wanted.", _TIMEOUT),
        _header(caller.FIRST_TOKEN[1], "Another name of the header above.", _TIMEOUT),
        _header(caller.QUEUE_TIMEOUT, "Milliseconds that the request may wait in the queue.", _TIMEOUT),
        _header(caller.REQUEST_TIMEOUT, "Milliseconds until the answer must be whole.", _TIMEOUT),
        _header(
            caller.GRPC_TIMEOUT,
            "The request timeout in gRPC's form: digits and one of H, M, S, m, u, n.",
            {"type": "string", "pattern": "^[0-9]{1,8}[HMSmun]$"},
        ),
    )
}
"""Headers by name. The server accepts more than the schemas promise, such as half a millisecond."""
_Schemas = Mapping[tuple[str, JsonSchemaMode], Json]
"""The schemas of the types that routes name, of bodies in mode `validation`, of answers in mode `serialization`."""
_VARIABLE = re.compile(r"\{(\w+)(?::[^{}]*)?\}")
_APIS = {
    "GenerateParameters": Api.TGI,
    "VertexParameters": Api.TGI,
    "ChatBody": Api.CHAT,
    "CompletionBody": Api.COMPLETIONS,
    "ResponsesBody": Api.RESPONSES,
    "MessagesBody": Api.MESSAGES,
}
"""The bodies whose sampling parameters have ranges."""
_INT32 = 2**31
"""End of the range that generated clients use for integers without a format."""


def document(table: Iterable[Route], version: str, *, keys: bool) -> Json:
    """The document of the routes in `table`; `keys`: routes other than probes require an API key."""
    routes = [route for route in table if route.documented]
    schemas, components = _schemas(routes)
    paths: dict[str, Json] = {}
    for route in routes:
        path = _VARIABLE.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(
            route, schemas, needs_key=keys and not (route.probe or route.public)
        )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Text Generation Inference",
            "version": version,
            "license": {"name": "Apache 2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        "servers": [{"url": "/", "description": "This server."}],
        "tags": [{"name": tag} for tag in dict.fromkeys(route.tag for route in routes if route.tag)],
        "paths": paths,
        "components": {
            "schemas": components,
            "headers": _HEADERS | _OWN_HEADERS,
            "parameters": CALLER_HEADERS,
            "securitySchemes": _SECURITY,
        },
        # Without keys of its own, a server may stand behind a proxy that asks for one.
        "security": [*([] if keys else [{}]), *({name: []} for name in _SECURITY)],
    }


def _schemas(routes: Sequence[Route]) -> tuple[_Schemas, Json]:
    taken = dict.fromkeys(route.body for route in routes if route.body is not None)
    answered = dict.fromkeys(ERROR_ANSWERS.values())
    for route in routes:
        answered |= dict.fromkeys(model for model in (route.answer, route.events) if model is not None)
    bodies, body_parts = _schemas_of(tuple(taken), "validation")
    answers, answer_parts = _schemas_of(tuple(answered), "serialization")
    assert not body_parts.keys() & answer_parts.keys(), "two schemas of one name"
    return {**bodies, **answers}, body_parts | answer_parts


@cache
def _schemas_of(models: tuple[Any, ...], mode: JsonSchemaMode) -> tuple[_Schemas, Json]:
    """Return the schemas of the bodies or answers. Reading the docstrings of their fields takes 0.2 s."""
    inputs = [(repr(model), mode, TypeAdapter(model)) for model in models]
    schemas, definitions = TypeAdapter.json_schemas(inputs, ref_template=_SCHEMAS, schema_generator=_PlainSchemas)
    parts = definitions.get("$defs", {})
    for name, api in _APIS.items():
        fields = parts.get(name, {}).get("properties", {})
        for parameter in SAMPLING_PARAMETERS:
            if (field := parameter.names.get(api)) in fields and (allowed := parameter.allowed(api)) is not None:
                fields[field] |= allowed.json_schema
    return schemas, parts


class _PlainSchemas(GenerateJsonSchema):
    """Schemas that generators of clients can use: without titles of fields, defaults, which some generators take for
    required, and ranges of wide integers.

    In requests null is absence, and no client needs it. Answers may get further fields, so that no client refuses them.
    """

    def field_title_should_be_set(self, schema: core_schema.CoreSchema) -> bool:
        return False

    def nullable_schema(self, schema: core_schema.NullableSchema) -> Json:
        return self.generate_inner(schema["schema"]) if self.mode == "validation" else super().nullable_schema(schema)

    def none_schema(self, schema: core_schema.NoneSchema) -> Json:
        return {"type": ["string", "null"], "description": "Always null."}

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> Json:
        return {name: value for name, value in super().default_schema(schema).items() if name != "default"}

    def int_schema(self, schema: core_schema.IntSchema) -> Json:
        plain = super().int_schema(schema)
        bounds = {name: value for name, value in plain.items() if name != "type"}
        large = {"format": "int64"} if any(abs(value) > _INT32 for value in bounds.values()) else {}
        return {"type": "integer"} | large | {name: value for name, value in bounds.items() if abs(value) < _INT32}

    def typed_dict_schema(self, schema: core_schema.TypedDictSchema) -> Json:
        plain = super().typed_dict_schema(schema)
        return {name: value for name, value in plain.items() if (name, value) != ("additionalProperties", False)}


def _operation(route: Route, schemas: _Schemas, *, needs_key: bool) -> Json:
    summary, description = _texts(route)
    operation: Json = {
        "operationId": route.name or route.handler.__name__,
        "summary": summary,
        "description": description or summary,
        "responses": {str(status): answer for status, answer in sorted(_responses(route, schemas, needs_key).items())},
    }
    if route.tag:
        operation["tags"] = [route.tag]
    if parameters := _parameters(route):
        operation["parameters"] = parameters
    if route.body is not None:
        media: Json = {"schema": schemas[repr(route.body), "validation"]}
        if (example := _EXAMPLES.get(operation["operationId"])) is not None:
            media["example"] = example
        operation["requestBody"] = {"required": True, "content": {JSON: media}}
    if not needs_key:
        operation["security"] = []
    return operation


def _parameters(route: Route) -> list[Json]:
    """The variables of the path and, for routes that generate, the request headers."""
    variables: list[Json] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _VARIABLE.findall(route.path)
    ]
    headers = CALLER_HEADERS if Operation.GENERATE in route.operations else ()
    if set(route.dialects) >= {Dialect.OPENAI, Dialect.ANTHROPIC}:
        variables.append(_ANTHROPIC_VERSION)
    return [*variables, *({"$ref": f"#/components/parameters/{name}"} for name in headers)]


def _texts(route: Route) -> tuple[str, str]:
    """The first line of the handler's docstring, without the path before it, and the rest."""
    first, _, rest = (getdoc(route.handler) or "").partition("\n")
    text = first.partition(": ")[2] if re.match(r"[A-Z]+ \S", first) and ": " in first else first
    return text[:1].upper() + text[1:], rest.strip()


def _responses(route: Route, schemas: _Schemas, needs_key: bool) -> dict[int, Json]:  # noqa: FBT001 - one caller
    responses: dict[int, Json] = {200: _good(route, schemas)}
    for dialect in route.dialects:
        schema = schemas[repr(ERROR_ANSWERS[dialect]), "serialization"]
        for error in (*route.errors, *((Unauthorized,) if needs_key else ())):
            _add_error(responses, dialect, error, schema)
    return responses


def _good(route: Route, schemas: _Schemas) -> Json:
    response = _response(
        "Server-sent events." if route.answer is None and route.events is not None else "The response."
    )
    content: Json = {}
    if route.answer is not None:
        content[route.content_type] = {"schema": schemas[repr(route.answer), "serialization"]}
    if route.events is not None:
        text = "Server-sent events: lines `data: …` with JSON of `contentSchema`, a blank line after each."
        content[_EVENTS] = {
            "schema": {
                "type": "string",
                "description": text,
                "contentSchema": schemas[repr(route.events), "serialization"],
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
