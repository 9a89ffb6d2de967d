"""/tokenize, /detokenize, /chat_tokenize, /tokenizer_info and /v1/models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from api_settings import api_settings
from every_dialect import VERBATIM
from http_stack import LIMITS, Stack, serve, served

from text_generation_router.api.tgi.service import MAX_IDS

TEXT = "Grüße, 世界! <|im_end|>\n"
CREATED = 1767323045


pytestmark = pytest.mark.asyncio(loop_scope="module")


stack = served(chat_template=VERBATIM, settings={"served_model_name": "nick/name", "created": CREATED})


async def test_detokenize_inverts_tokenize(stack: Stack) -> None:
    ids = [token["id"] for token in (await stack.ask("/tokenize", {"inputs": TEXT})).body]
    for name in ("ids", "tokens"):
        assert (await stack.ask("/detokenize", {name: ids}))[:2] == (200, {"text": TEXT, "prompt": TEXT})


async def test_tokenize_in_vllms_form(stack: Stack) -> None:
    ids = [token["id"] for token in (await stack.ask("/tokenize", {"inputs": TEXT})).body]
    body = {"prompt": TEXT, "add_special_tokens": False}
    assert (await stack.ask("/tokenize", body)).body == {"count": len(ids), "max_model_len": 2048, "tokens": ids}


@pytest.mark.parametrize("words", [3, 20_000])
async def test_chat_tokenize_returns_the_tokens_of_the_rendered_text(stack: Stack, words: int) -> None:
    body = {"messages": [{"role": "user", "content": "grün " * words}]}
    status, reply, headers = await stack.ask("/chat_tokenize", body)
    # A long list is streamed, so that its length is not known in advance.
    assert (status, headers.get("transfer-encoding") == "chunked") == (200, words > 512)
    assert list(reply) == ["tokenize_response", "templated_text"]
    assert reply["tokenize_response"] == (await stack.ask("/tokenize", {"inputs": reply["templated_text"]})).body


async def test_detokenize_takes_known_ids(stack: Stack) -> None:
    for ids in ([], [1] * 100_000):
        status, reply, _ = await stack.ask("/detokenize", {"ids": ids})
        assert (status, bool(reply["text"])) == (200, bool(ids))
    vocabulary = stack.tokenizer.vocabulary
    for ids in ([2**31], [1, 2**20], [vocabulary]):
        status, reply, _ = await stack.ask("/detokenize", {"ids": ids})
        assert (status, reply["error_type"]) == (422, "validation")
    wrong = (None, "1", [-1], [1.5], [2**32], [1] * (MAX_IDS + 1))
    for body in ({}, *({"ids": ids} for ids in wrong)):
        status, text, _ = await stack.ask("/detokenize", body)
        assert status == 422
        assert text.startswith("Failed to deserialize the JSON body into the target type: ")


async def test_models_lists_the_served_model(stack: Stack) -> None:
    def listed(name: str) -> dict[str, object]:
        model = {"id": name, "object": "model", "created": CREATED, "owned_by": "echo", "root": "echo", "parent": None}
        return model | {"max_model_len": 2048}

    both = [listed("nick/name"), listed("echo")]
    assert (await stack.ask("/v1/models")).body == {"object": "list", "data": both}
    for name, model in (("echo", "echo"), ("tgi", "nick/name"), ("nick/name", "nick/name")):
        assert (await stack.ask(f"/v1/models/{name}")).body == listed(model)
    refused = await stack.ask("/v1/models/some/other")
    error = refused.body["error"]
    said = "The model `some/other` does not exist. This server has `nick/name`, `echo`"
    assert (refused.status, error["message"], error["code"]) == (404, said, "model_not_found")


async def test_names_that_are_paths_are_listed_after_those_that_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients take the first name of the list."""
    monkeypatch.chdir(tmp_path)
    for model_id, operators, names in (
        ("/data/demo/", "", ["demo"]),
        ("/data/demo", "gpt-4o,*", ["gpt-4o", "demo"]),
        ("~/demo", "", ["demo"]),
        ("models/demo", "", ["demo"]),
        ("org/demo", "gpt-4o", ["gpt-4o"]),
    ):
        folder = str(tmp_path / "models" / "demo")  # as the launcher writes it
        settings = api_settings(LIMITS, model_id=model_id, model_path=folder, served_model_name=operators)
        assert settings.model_names == (*names, model_id)
        assert all(map(settings.serves, settings.model_names))


async def test_a_server_of_any_name_takes_every_model_and_answers_with_that_name(demo_model: Path) -> None:
    async with serve(demo_model, settings={"served_model_name": "*,nick/name"}) as stack:
        for path, body in BY_MODEL.items():
            for model in ("gpt-4o", "claude-opus-5", "some/other", "nick/name"):
                status, reply, _ = await stack.ask(path, body | {"model": model})
                assert status == 200, reply
                if "model" in reply:
                    assert reply["model"] == model
        for headers in ({}, {"anthropic-version": "2023-06-01"}):
            listed = (await stack.ask("/v1/models", headers=headers)).body["data"]
            assert [model["id"] for model in listed] == ["nick/name", "echo"]
            assert (await stack.ask("/v1/models/gpt-4o", headers=headers)).body["id"] == "gpt-4o"


async def test_anthropics_clients_get_the_models_and_errors_in_its_form(stack: Stack) -> None:
    async def get(path: str) -> tuple[int, dict[str, Any]]:
        status, body, headers = await stack.ask(path, headers={"anthropic-version": "2023-06-01"})
        assert "request-id" in headers
        return status, body

    def card(name: str) -> dict[str, object]:
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": "2026-01-02T03:04:05Z",
            "lifecycle": "active",
            "max_input_tokens": 1024,
            "max_tokens": 2048,
        }

    both = {"data": [card("nick/name"), card("echo")], "has_more": False, "first_id": "nick/name", "last_id": "echo"}
    first = {"data": [card("nick/name")], "has_more": True, "first_id": "nick/name", "last_id": "nick/name"}
    last = {"data": [card("echo")], "has_more": False, "first_id": "echo", "last_id": "echo"}
    assert await get("/v1/models") == (200, both)
    assert await get("/v1/models?limit=1") == (200, first)
    assert await get("/v1/models?limit=1&after_id=nick/name") == (200, last)
    assert await get("/v1/models?before_id=echo") == (200, first | {"has_more": False})
    assert await get("/v1/models/echo") == (200, card("echo"))
    for path, status, kind in (
        ("/v1/models/other", 404, "not_found_error"),
        ("/v1/nowhere", 404, "not_found_error"),
        ("/v1/models?limit=0", 400, "invalid_request_error"),
        ("/v1/models?after_id=other", 400, "invalid_request_error"),
    ):
        refused, error = await get(path)
        assert (refused, error["type"], error["error"]["type"]) == (status, "error", kind)


HI = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
BY_MODEL: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": HI,
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/v1/messages": HI,
    "/v1/messages/count_tokens": HI,
    "/chat_tokenize": HI,
    "/invocations": HI,
}


@pytest.mark.parametrize("path", BY_MODEL)
async def test_a_model_that_is_not_served_is_refused(stack: Stack, path: str) -> None:
    """The name may be that of an adapter: the base model must not answer for it."""
    for name in ("echo", "tgi", "dummy", "m", "http://127.0.0.1:3000", "nick/name", ""):
        status, reply, _ = await stack.ask(path, BY_MODEL[path] | {"model": name})
        assert status == 200, reply
    for fields in ({}, {"stream": True}):
        status, reply, _ = await stack.ask(path, BY_MODEL[path] | {"model": "my-adapter", **fields})
        assert (status, "`my-adapter` does not exist" in str(reply)) == (404, True), reply
        if path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
            assert (reply["error"]["type"], reply["error"]["code"]) == ("invalid_request_error", "model_not_found")
        if path.startswith("/v1/messages"):
            assert reply["error"]["type"] == "not_found_error"
    await stack.assert_empty()


@pytest.mark.parametrize("path", ["/", "/generate", "/generate_stream", "/invocations", "/vertex"])
async def test_an_adapter_that_is_not_loaded_is_refused(stack: Stack, path: str) -> None:
    def body(adapter: str | None) -> dict[str, Any]:
        asked = {"inputs": "Hi", "parameters": {"max_new_tokens": 1, "adapter_id": adapter}}
        return {"instances": [asked]} if path == "/vertex" else asked

    for adapter in (None, ""):
        assert (await stack.ask(path, body(adapter)))[0] == 200
    status, reply, _ = await stack.ask(path, body("../my-adapter"))
    assert (status, reply["error_type"]) == (404, "not_found")
    assert reply["error"] == "The adapter `../my-adapter` does not exist"
    await stack.assert_empty()
