"""Parameters that the engine does not support are refused by name, in every dialect, before the request is queued.

The engine, in this process behind gRPC and HTTP, supports almost nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checked_echo import RecordingEcho, recording
from every_dialect import VERBATIM
from http_stack import Stack, serve, served

from text_generation_proto.values import GrammarKind

Json = dict[str, Any]

FIELDS = (
    *("temperature", "top_k", "top_p", "typical_p", "min_p", "repetition_penalty", "frequency_penalty", "watermark"),
    *("output_frequency_penalty", "output_presence_penalty", "logit_bias_ids", "seed", "stop_token_ids"),
    *("allowed_token_ids", "bad_words"),
    *("min_new_tokens", "top_n", "prompt", "prompt_top_n", "cache_salt", "unknown_to_this_router"),
)

CHAT: Json = {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 2}
COMPLETION: Json = {"prompt": "Hello there", "max_tokens": 2}
RESPONSE: Json = {"input": "Hello there", "max_output_tokens": 2}
INPUT: Json = {"name": "a", "shape": [1], "datatype": "BYTES", "data": ["Hello"]}
KSERVE = "/v2/models/m/versions/1/infer"


def tgi(**parameters: object) -> Json:
    return {"inputs": "Hello there", "parameters": {"max_new_tokens": 2, **parameters}}


def chat(**fields: object) -> Json:
    return CHAT | fields


UNSUPPORTED = {field: f"there is no {field}" for field in FIELDS}
stack = served(build=recording(engine="tensorrt-llm", unsupported=(*UNSUPPORTED.items(),)))
JSON_ONLY = recording(grammar_kinds=(GrammarKind.JSON_SCHEMA,))
"""An engine that follows only JSON schemas."""


pytestmark = pytest.mark.asyncio(loop_scope="module")

REFUSED: list[tuple[str, Json, str, str]] = [
    # (path, body, the client's name, the engine's name); all names: tests/unit/router/api/core/test_parameters.py
    ("/generate", tgi(cache_salt="a"), "cache_salt", "cache_salt"),
    ("/generate_stream", tgi(typical_p=0.5), "typical_p", "typical_p"),
    ("/", tgi(watermark=True) | {"stream": True}, "watermark", "watermark"),
    ("/invocations", tgi(seed=0, do_sample=True), "seed", "seed"),
    ("/invocations", chat(top_logprobs=2), "top_logprobs", "top_n"),
    ("/vertex", {"instances": [chat(min_p=0.5)]}, "min_p", "min_p"),
    (KSERVE, {"inputs": [INPUT], "parameters": {"top_k": 2}}, "top_k", "top_k"),
    ("/v1/chat/completions", chat(frequency_penalty=0.1), "frequency_penalty", "output_frequency_penalty"),
    (
        "/v1/completions",
        COMPLETION | {"logprobs": 0, "echo": True},
        "prompt_logprobs` or `echo` with `logprobs",
        "prompt",
    ),
    ("/v1/responses", RESPONSE | {"temperature": 0.5}, "temperature", "temperature"),
    ("/v1/messages", chat(cache_salt="a"), "cache_salt", "cache_salt"),
]
STREAMING = ("/v1/", "/invocations")


@pytest.mark.parametrize(("path", "body", "name", "field"), REFUSED, ids=[f"{row[0]}-{row[2]}" for row in REFUSED])
async def test_an_unsupported_parameter_is_refused_by_name(
    stack: Stack, path: str, body: Json, name: str, field: str
) -> None:
    text = f"Input validation error: `{name}` is not supported by this engine: there is no {field}"
    queued = stack.scheduler.stats().prompt_tokens
    bodies = [body, body | {"stream": True}] if path.startswith(STREAMING) else [body]
    for sent in bodies:
        status, reply, _ = await stack.ask(path, sent)
        assert reply == error_body(path, sent, text)
        assert status == (422 if "error_type" in reply else 400)
    assert stack.scheduler.stats().prompt_tokens == queued
    assert stack.permits.in_use == 0


def error_body(path: str, body: Json, text: str) -> Json:
    if path == "/v1/messages":
        return {"type": "error", "error": {"type": "invalid_request_error", "message": text}}
    if path.startswith("/v1/") or (path == "/invocations" and "inputs" not in body):
        words = {"type": "invalid_request_error", "code": "unsupported_parameter", "http_status_code": 400}
        return {"error": {"message": text, "param": text.split("`")[1], **words}}
    return {"error": text, "error_type": "validation"}


NEUTRAL_TGI = tgi(
    temperature=1.0, repetition_penalty=1.0, frequency_penalty=0.0, watermark=False, top_n_tokens=0, cache_salt="",
    decoder_input_details=False, details=True, stop=["no such text"],
)  # fmt: skip
NEUTRAL_CHAT = chat(
    temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0,
    logit_bias={"5": 0.0}, min_tokens=0, stop_token_ids=[], bad_words=[], logprobs=True, top_logprobs=0, n=2,
)  # fmt: skip
SERVED: list[tuple[str, Json]] = [
    ("/generate", NEUTRAL_TGI),
    ("/generate", tgi(best_of=2, do_sample=True)),
    ("/generate", tgi(seed=7)),  # a greedy request needs no seed
    ("/v1/chat/completions", NEUTRAL_CHAT),
    ("/v1/chat/completions", chat(temperature=0, seed=7, top_p=0.5, top_k=5)),
    ("/v1/completions", COMPLETION | {"logprobs": 0}),
    ("/v1/completions", COMPLETION | {"echo": True}),
    ("/v1/responses", RESPONSE),
    ("/v1/messages", CHAT),
    ("/vertex", {"instances": [{"inputs": "Hello", "parameters": {"max_new_tokens": 2}}, CHAT]}),
]


@pytest.mark.parametrize(("path", "body"), SERVED, ids=[f"{path}-{number}" for number, (path, _) in enumerate(SERVED)])
async def test_neutral_values_are_served(stack: Stack, path: str, body: Json) -> None:
    reply = await stack.ask(path, body)
    assert reply.status == 200, reply


async def test_support_is_checked_after_all_other_rules(echo_model: Path) -> None:
    body = tgi(grammar={"type": "json", "value": {}}, watermark=True)
    build = recording(unsupported=(("watermark", "no"),))
    async with serve(echo_model, build=build, grammars=True) as stack:
        told = (await stack.ask("/generate", body)).body["error"]
    assert "grammar is not valid: Grammar must have a 'properties' field" in told


async def test_a_grammar_is_refused_if_grammars_are_off(stack: Stack) -> None:
    status, told, _ = await stack.ask("/generate", tgi(grammar={"type": "regex", "value": "a"}))
    assert (status, told["error"]) == (422, "Input validation error: grammar is not supported")


async def test_info_names_the_engine_and_what_it_does_not_support(stack: Stack) -> None:
    info = (await stack.ask("/info")).body
    assert info["engine"] == "tensorrt-llm"
    assert info["unsupported"] == UNSUPPORTED
    assert (info["model_dtype"], info["model_device_type"]) == ("float32", "cpu")
    assert (info["router"], info["docker_label"], info["model_id"]) == ("text-generation-router", None, "echo")


async def test_a_grammar_of_a_kind_that_the_engine_does_not_follow(echo_model: Path) -> None:
    async with serve(echo_model, build=JSON_ONLY, grammars=True) as stack:
        schema = {"type": "json", "value": {"properties": {"a": {"type": "boolean"}}, "required": ["a"]}}
        assert await stack.generate("Hello", max_new_tokens=20, grammar=schema)
        status, told, _ = await stack.ask("/generate", tgi(grammar={"type": "regex", "value": "a+"}))
    assert status == 422
    assert told["error"] == "Input validation error: grammar is not supported: this engine follows none of kind `regex`"


async def test_strict_tools_are_unconstrained_if_the_engine_has_no_lark(echo_model: Path) -> None:
    function = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {}}}
    body = chat(tools=[{"type": "function", "function": function}])
    async with serve(
        echo_model, build=JSON_ONLY, grammars=True, chat_template=VERBATIM, tool_call_parser="hermes"
    ) as stack:
        assert (await stack.ask("/v1/chat/completions", body)).status == 200
        assert isinstance(stack.engine, RecordingEcho)
        assert [each.grammar for each in stack.engine.placements] == [None]
