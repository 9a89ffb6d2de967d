"""The OpenAPI document lists every route, and responses match it."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import jsonschema
import pytest
from http_stack import Stack, served

Json = dict[str, Any]
HELLO: Json = {"inputs": "Hello there"}
DETAILED: Json = {"max_new_tokens": 3, "details": True, "decoder_input_details": True, "top_n_tokens": 2}
BEST: Json = {"max_new_tokens": 3, "details": True, "best_of": 2, "do_sample": True}
CHAT: Json = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
INFER: Json = {"inputs": [{"name": "a", "shape": [1], "datatype": "BYTES", "data": ["hi"]}], "parameters": BEST}


pytestmark = pytest.mark.asyncio(loop_scope="module")


stack = served(settings={"payload_limit": 2_000_000})


async def document_of(stack: Stack) -> Json:
    document: Json = (await stack.ask("/api-doc/openapi.json")).body
    return document


def closed(document: Json) -> Json:
    """Return the components of a document, without fields that it does not list."""
    schemas = document["components"]["schemas"]
    return {"schemas": {name: {"additionalProperties": False, **schema} for name, schema in schemas.items()}}


async def test_every_reference_resolves_and_every_operation_has_an_id(stack: Stack) -> None:
    document = await document_of(stack)
    assert (await stack.ask("/openapi.json")).body == document, "the usual path"
    for reference in set(re.findall(r"'\$ref': '([^']*)'", str(document))):
        found: Any = document
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]
        assert isinstance(found, dict)
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(set(ids)) == len(ids)
    assert {"chat_completions", "completions", "create_response", "create_message", "generate", "list_models"} <= {*ids}
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", name) for name in ids)
    assert all(operation["summary"] and operation["description"] and operation["tags"] for operation in operations)
    assert document["servers"] == [{"url": "/", "description": "This server."}]
    assert document["security"] == [{}, {"bearer": []}, {"x-api-key": []}], "a proxy may ask for a key"


async def test_schemas_are_plain_for_generators_of_clients(stack: Stack) -> None:
    document = await document_of(stack)
    schemas = document["components"]["schemas"]
    assert not [name for name in schemas if not re.fullmatch(r"[A-Za-z]+", name)]
    bodies = [name for name in schemas if name.endswith("Body")]
    fields = [field for name in bodies for field in schemas[name]["properties"].values()]
    assert not [field for field in fields if {"allOf", "title", "default"} & field.keys()]
    assert "null" not in str(fields)
    assert all(field.get("description") for field in fields if "$ref" not in field)
    assert "'allOf'" not in str(document)
    assert not [field for name in schemas for field in properties(schemas[name]) if field.get("type") == "null"]


def properties(schema: Json) -> list[Json]:
    return list(schema.get("properties", {}).values())


async def test_examples_are_valid_and_accepted(stack: Stack) -> None:
    document = await document_of(stack)
    tried = 0
    for path, methods in document["paths"].items():
        if "post" not in methods:
            continue
        media = methods["post"]["requestBody"]["content"]["application/json"]
        resolvable = {**media["schema"], "components": document["components"]}
        jsonschema.validate(media["example"], resolvable, cls=jsonschema.Draft202012Validator)
        url = path.replace("{name}", "a").replace("{version}", "1")
        async with stack.client.post(url, json=media["example"]) as response:
            status = 404 if "lora_adapter" in path else 200  # not without --lora-modules-dir
            assert (path, response.status) == (path, status), await response.text()
            assert len(await response.read()) < 10_000
        tried += 1
    assert tried >= 14


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("get", "/info", None, 200),
        ("get", "/tokenizer_info", None, 200),
        ("get", "/v1/models", None, 200),
        ("get", "/v1/models/echo", None, 200),
        ("get", "/v1/models/other", None, 404),
        ("get", "/v2", None, 200),
        ("get", "/v2/health/live", None, 200),
        ("get", "/v2/models/a/versions/1", None, 200),
        ("post", "/", {**HELLO, "parameters": DETAILED}, 200),
        ("post", "/generate", HELLO, 200),
        ("post", "/generate", {**HELLO, "parameters": DETAILED}, 200),
        ("post", "/generate", {**HELLO, "parameters": BEST}, 200),
        ("post", "/generate", {"inputs": ""}, 422),
        ("post", "/generate", {}, 422),
        ("post", "/tokenize", HELLO, 200),
        ("post", "/tokenize", {"prompt": "Hello there"}, 200),
        ("post", "/chat_tokenize", {"messages": [{"role": "user", "content": "Hello"}]}, 200),
        ("post", "/detokenize", {"ids": [1, 2]}, 200),
        ("post", "/detokenize", {"ids": [2**31]}, 422),
        ("post", "/invocations", {**HELLO, "parameters": DETAILED}, 200),
        ("post", "/vertex", {"instances": [HELLO]}, 200),
        ("post", "/vertex", {"instances": []}, 422),
        ("post", "/v2/models/a/versions/1/infer", INFER, 200),
        ("post", "/v1/chat/completions", {"messages": []}, 400),
        ("post", "/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "n": 2}, 200),
        ("post", "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "echo": True, "logprobs": 1}, 200),
        ("post", "/v1/responses", {"input": "Hello"}, 200),
        ("post", "/v1/responses", {"input": "Hello", "background": True}, 400),
        ("post", "/v1/messages", {**CHAT, "model": "tgi"}, 200),
        ("post", "/v1/messages", {**CHAT, "model": "tgi", "messages": []}, 400),
        ("post", "/v1/messages/count_tokens", {**CHAT, "model": "tgi"}, 200),
        ("post", "/invocations", CHAT, 200),
        ("post", "/v1/completions", {"prompt": 1}, 400),
    ],
)
async def test_responses_match_their_schema(
    stack: Stack, method: str, path: str, body: Json | None, status: int
) -> None:
    document = await document_of(stack)
    template = next(known for known in document["paths"] if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", known), path))
    described = document["paths"][template][method]["responses"][str(status)]
    async with stack.client.request(method, path, json=body) as response:
        assert response.status == status
        schema = described["content"][response.content_type]["schema"]
        if response.content_type == "application/json":
            resolvable = {**schema, "components": closed(document)}
            jsonschema.validate(await response.json(), resolvable, cls=jsonschema.Draft202012Validator)


KSERVE = "/v2/models/{name}/versions/{version}/infer"
STREAMS: list[tuple[str, Json]] = [
    ("/generate_stream", {**HELLO, "parameters": {"max_new_tokens": 3}}),
    ("/generate_stream", {**HELLO, "parameters": {"max_new_tokens": 3, "details": True, "top_n_tokens": 2}}),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 3, "logprobs": 1}),
    ("/v1/responses", {"input": "Hello", "max_output_tokens": 5}),
    ("/v1/messages", {**CHAT, "model": "tgi"}),
]


@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_events_match_their_schema(stack: Stack, path: str, body: Json) -> None:
    document = await document_of(stack)
    answers = document["paths"][path]["post"]["responses"]["200"]["content"]
    schema = {**answers["text/event-stream"]["schema"]["contentSchema"], "components": closed(document)}
    async with stack.client.post(path, json=body | {"stream": True}) as response:
        events = [line.removeprefix(b"data: ") async for line in response.content if line.startswith(b"data:")]
    if path.endswith("completions"):
        assert events.pop() == b"[DONE]\n"
    assert len(events) >= 3
    for event in events:
        jsonschema.validate(json.loads(event), schema, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize("path", ["/docs", "/docs/"])
async def test_the_page_loads_nothing_from_other_servers(stack: Stack, path: str) -> None:
    async with stack.client.get(path) as response:
        assert response.content_type == "text/html"
        policy = response.headers["content-security-policy"]
        page = await response.text()
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "//" not in page
    assert "<script>" not in page
    links = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(links) == 4
    for link in links:
        async with stack.client.get(path.rpartition("/")[0] + "/" + link) as response:
            assert response.status == 200
            assert response.headers["x-content-type-options"] == "nosniff"
            assert await response.read()


async def test_no_other_file_is_served(stack: Stack) -> None:
    for path in ("/docs/../docs.py", "/docs/%2e%2e/core.py", "/docs/LICENSE", "/docs/swagger-ui.css/x"):
        assert (await stack.ask(path)).status == 404


async def test_every_body_has_a_size_limit_and_must_be_json(stack: Stack) -> None:
    taking = [path for path, methods in (await document_of(stack))["paths"].items() if "post" in methods]
    assert len(taking) > 10
    headers = {"content-type": "application/json"}
    for path in (known.replace("{name}", "a").replace("{version}", "1") for known in taking):
        for body, status in ((b" " * 2_000_001, 413), (b"{", 400), (b"[]", 400 if path.startswith("/v1/") else 422)):
            async with stack.client.post(path, data=io.BytesIO(body), headers=headers) as response:
                assert (path, response.status) == (path, status)
        async with stack.client.post(path, data=b"{}", headers={"content-type": "text/plain"}) as response:
            assert (path, response.status) == (path, 415)


async def test_routes_that_generate_document_timeouts_and_retry_after(stack: Stack) -> None:
    document = await document_of(stack)
    headers = {f"#/components/parameters/{name}" for name in document["components"]["parameters"]}
    for path in (*(path for path, _ in STREAMS), "/", "/invocations", "/vertex", KSERVE):
        operation = document["paths"][path]["post"]
        assert headers <= {parameter.get("$ref") for parameter in operation["parameters"]}
        answers = operation["responses"]
        assert "Retry-After" not in answers["408"]["headers"]
        for status in ("429", "503"):
            assert answers[status]["headers"]["Retry-After"] == {"$ref": "#/components/headers/Retry-After"}
    assert "parameters" not in document["paths"]["/tokenize"]["post"]


async def test_documented_header_values_are_accepted(stack: Stack) -> None:
    described = (await document_of(stack))["components"]["parameters"]
    body = HELLO | {"parameters": {"max_new_tokens": 1}}
    for name, parameter in described.items():
        schema = parameter["schema"]
        values = [str(schema["maximum"])] if "maximum" in schema else []  # the minimum expires at once
        values += schema.get("enum", [])
        values += ["a" * schema["maxLength"]] if "maxLength" in schema else []
        values += ["999H", "9999999S", "1M"] if name == "grpc-timeout" else []
        assert values
        for value in values:
            assert (await stack.ask("/generate", body, {name: value})).status == 200, (name, value)
