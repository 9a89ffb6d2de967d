"""Responses of TGI's routes: fields, key order, headers; a stream agrees with a complete reply, in 20 scripts and emoji."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from corpus import CORPUS
from every_dialect import stream_data
from full_grid import full
from http_stack import Stack, serve, served

PROMPT = "Was ist schön? 漢字と😀 <|im_end|> The end."


pytestmark = pytest.mark.asyncio(loop_scope="module")


stack = served()


async def post(stack: Stack, route: str, body: dict[str, Any]) -> bytes:
    async with stack.client.post(route, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.read()


async def stream(stack: Stack, body: dict[str, Any], route: str = "/generate_stream") -> list[dict[str, Any]]:
    text = await post(stack, route, body)
    events = stream_data(text)
    assert text.count(b"\n\n") == text.count(b"\n") / 2 == len(events)
    return events


def token(id: int, text: str) -> str:
    return f'{{"id":{id},"text":"{text}","logprob":-0.5,"special":false}}'


async def test_details_come_in_tgis_order_and_prompt_details_imply_them(stack: Stack) -> None:
    body: dict[str, Any] = {"inputs": "Test request", "parameters": {"max_new_tokens": 1, "details": True}}
    head = '{"generated_text":"Test","details":{"finish_reason":"length","generated_tokens":1,"seed":null,"prefill":['
    tail = f'],"tokens":[{token(6310, "Test")}]}}}}'
    assert (await post(stack, "/generate", body)).decode() == head + tail
    body["parameters"] = {"max_new_tokens": 1, "decoder_input_details": True}
    prompt = '{"id":6310,"text":"Test","logprob":null},{"id":3116,"text":" request","logprob":-0.5}'
    assert (await post(stack, "/generate", body)).decode() == head + prompt + tail


async def test_best_of_returns_the_other_sequences_too(stack: Stack) -> None:
    parameters = {"max_new_tokens": 1, "best_of": 3, "details": True, "temperature": 0.5, "top_n_tokens": 1}
    text = await post(stack, "/generate", {"inputs": "Test", "parameters": parameters})
    details = json.loads(text)["details"]
    fields = ["finish_reason", "generated_tokens", "seed", "prefill", "tokens"]
    assert list(details) == [*fields, "best_of_sequences", "top_tokens"]
    assert len(details["best_of_sequences"]) == 2
    for sequence in details["best_of_sequences"]:
        assert list(sequence) == ["generated_text", *fields, "top_tokens"]
        [[top]] = sequence["top_tokens"]
        assert list(top.items()) == [("id", 6310), ("text", "Test"), ("logprob", -0.5), ("special", False)]
    assert len({details["seed"], *(sequence["seed"] for sequence in details["best_of_sequences"])}) == 3


async def test_the_seed_is_returned_only_if_it_was_used(stack: Stack) -> None:
    greedy = await stack.generate("Test", max_new_tokens=1, details=True, seed=7)
    sampled = await stack.generate("Test", max_new_tokens=1, details=True, seed=7, temperature=0.5)
    assert (greedy["details"]["seed"], sampled["details"]["seed"]) == (None, 7)


async def test_a_complete_reply_has_timing_headers(stack: Stack) -> None:
    body = {"inputs": "schön 😀", "parameters": {"max_new_tokens": 3}}
    headers = (await stack.ask("/generate", body)).headers
    assert headers["content-type"] == "application/json"
    assert headers["x-compute-type"] == "gpu+optimized"
    assert headers["x-compute-characters"] == "7"
    assert headers["x-generated-tokens"] == "3"
    assert int(headers["x-prompt-tokens"]) == len(stack.tokenizer.encode("schön 😀", add_special_tokens=True).ids)
    assert 0 < float(headers["x-compute-time"]) < 10
    for name in ("total", "validation", "queue", "inference"):
        assert headers[f"x-{name}-time"].isdigit()
    assert headers["x-time-per-token"].isdigit()


async def test_a_stream_has_the_headers_of_a_stream(stack: Stack) -> None:
    body = {"inputs": "Test", "parameters": {"max_new_tokens": 1}}
    headers = (await stack.ask("/generate_stream", body)).headers
    assert headers["content-type"] == "text/event-stream"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert headers["x-compute-type"] == "gpu+optimized"
    assert headers["x-compute-characters"] == "4"
    assert "x-total-time" not in headers


async def test_a_stream_has_one_event_per_token(stack: Stack) -> None:
    parameters = {"max_new_tokens": 2, "details": True}
    sent = await post(stack, "/generate_stream", {"inputs": "Test request", "parameters": parameters})
    assert sent.decode() == (
        f'data: {{"index":1,"token":{token(6310, "Test")},"generated_text":null,"details":null}}\n\n'
        f'data: {{"index":2,"token":{token(3116, " request")},"generated_text":"Test request",'
        '"details":{"finish_reason":"length","generated_tokens":2,"seed":null,"input_length":2}}\n\n'
    )


@pytest.mark.parametrize(
    "parameters",
    [
        {"max_new_tokens": 40},
        {"max_new_tokens": 40, "return_full_text": True},
        {"max_new_tokens": 40, "top_n_tokens": 3},
        {"max_new_tokens": 40, "stop": ["schön? 漢"]},
        {"max_new_tokens": 40, "stop": ["ist sc", "end"]},
        {"max_new_tokens": 9},
        {"max_new_tokens": 40, "temperature": 0.5, "seed": 3, "truncate": 8},
        {"max_new_tokens": 40, "watermark": True, "adapter_id": None},
    ],
)
async def test_a_stream_agrees_with_a_complete_reply(stack: Stack, parameters: dict[str, Any]) -> None:
    body = {"inputs": PROMPT, "parameters": {**parameters, "details": True}}
    whole = json.loads(await post(stack, "/generate", body))
    events = await stream(stack, body)
    assert [event["index"] for event in events] == list(range(1, len(events) + 1))
    assert [event["token"] for event in events] == whole["details"]["tokens"]
    assert [event.get("top_tokens") for event in events] == whole["details"].get("top_tokens", [None] * len(events))
    assert events[-1]["generated_text"] == whole["generated_text"]
    assert all(event["generated_text"] is None and event["details"] is None for event in events[:-1])
    for name in ("finish_reason", "generated_tokens", "seed"):
        assert events[-1]["details"][name] == whole["details"][name]
    spoken = "".join(event["token"]["text"] for event in events if not event["token"]["special"])
    assert whole["generated_text"].removeprefix(PROMPT) == spoken


async def test_the_root_wraps_its_reply_and_repeats_the_prompt(stack: Stack) -> None:
    body: dict[str, Any] = {"inputs": "Test request", "parameters": {"max_new_tokens": 1}}
    assert await post(stack, "/", body) == b'[{"generated_text":"Test requestTest"}]'
    [event] = await stream(stack, body | {"stream": True}, route="/")
    assert (event["generated_text"], event["details"]) == ("Test requestTest", None)
    body["parameters"]["return_full_text"] = False
    assert await post(stack, "/", body) == b'[{"generated_text":"Test"}]'
    assert await post(stack, "/generate", body) == b'{"generated_text":"Test"}'


@pytest.mark.parametrize("script", [full(name) if number % 3 else name for number, name in enumerate(CORPUS)])
async def test_streamed_whole_and_decoded_text_agree(stack: Stack, script: str) -> None:
    text = CORPUS[script]
    ids = stack.tokenizer.encode(text, add_special_tokens=True).ids
    echoed = text * 3
    stops = [[], [text[-2:] + text[:2]], [text[len(text) // 2 :] + text], ["never seen"], [text[1], text[:3]]]
    for stop in stops:
        parameters = {"max_new_tokens": 3 * len(ids), "stop": stop, "details": True}
        streamed = await stream(stack, {"inputs": text, "parameters": parameters})
        whole = await stack.generate(text, **parameters)
        joined = "".join(event["token"]["text"] for event in streamed if not event["token"]["special"])
        assert joined == streamed[-1]["generated_text"] == whole["generated_text"]
        end = min((echoed.index(word) + len(word) for word in stop if word in echoed), default=None)
        assert joined == echoed[:end]
        reason = "length" if end is None or end == len(echoed) else "stop_sequence"
        assert whole["details"]["finish_reason"] == streamed[-1]["details"]["finish_reason"] == reason
        if end is None:
            assert [event["token"]["id"] for event in streamed] == ids * 3


async def test_the_length_limits_are_inclusive(stack: Stack) -> None:
    reply = await stack.generate("Test", max_new_tokens=2047, details=True)
    assert reply["details"]["generated_tokens"] == 2047
    # More than fits is as much as fits, as in TGI, but never more than was asked for.
    reply = await stack.generate("Test", max_new_tokens=100_000, details=True)
    assert (reply["details"]["generated_tokens"], reply["details"]["finish_reason"]) == (2047, "length")


async def test_health_is_empty_or_an_error(demo_model: Path) -> None:
    well = True
    async with serve(demo_model, chats=False, healthy=lambda: well) as stack:
        for route, body in {"/health": "", "/ping": "", "/": "", "/v2/health/ready": {"live": True}}.items():
            well = True
            assert (await stack.ask(route))[:2] == (200, body)
            well = False
            assert (await stack.ask(route))[:2] == (503, {"error": "unhealthy", "error_type": "healthcheck"})
        for route in ("/health/live", "/v2/health/live"):
            assert (await stack.ask(route)).status == 200


async def test_info_lists_the_limits(stack: Stack) -> None:
    info = (await stack.ask("/info")).body
    fields = "model_id model_sha model_pipeline_tag max_concurrent_requests max_best_of max_stop_sequences "
    fields += (
        "max_input_tokens max_total_tokens token_logprobs validation_workers max_client_batch_size router version "
    )
    fields += "server_version sha docker_label model_dtype model_device_type engine speculate unsupported replicas replicas_serving shards prefix_cache isolated"
    assert list(info) == fields.split()
    assert info["version"] == "3.3.7", "a version that TGI's clients know"
    assert (info["model_id"], info["max_total_tokens"], info["router"]) == ("echo", 2048, "text-generation-router")
