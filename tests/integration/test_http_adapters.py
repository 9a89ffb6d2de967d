"""LoRA adapters behind HTTP: names, prefix cache, replicas that lack one. The echo engine with an adapter writes the prompt backwards."""

from __future__ import annotations

import pytest
from every_dialect import CHAT, COMPLETIONS, MESSAGES, RESPONSES, VERBATIM, Asking
from http_stack import Stack, served, until
from sse_client import post

PROMPT = " one two three four five six" * 20
FORWARDS, BACKWARDS = " one two", " six five"

pytestmark = pytest.mark.asyncio(loop_scope="module")


stack = served(chat_template=VERBATIM, lora_adapters="sql,org/french=/adapters/french@main")


async def text(stack: Stack, adapter: str | None) -> tuple[str, int]:
    """Return the text that TGI's route answers with, and the cached tokens."""
    reply = await stack.generate(PROMPT, max_new_tokens=2, details=True, adapter_id=adapter)
    await until(lambda: stack.scheduler.stats().running == 0)
    return reply["generated_text"], reply["details"].get("cached_tokens", 0)


async def test_adapters_share_no_cached_blocks_with_the_model_or_with_each_other(stack: Stack) -> None:
    first = [await text(stack, adapter) for adapter in (None, "sql", "org/french")]
    assert first == [(FORWARDS, 0), (BACKWARDS, 0), (BACKWARDS, 0)]
    again = [await text(stack, adapter) for adapter in ("org/french", "", "sql")]
    assert [answer for answer, _ in again] == [BACKWARDS, FORWARDS, BACKWARDS]
    assert all(cached >= 100 for _, cached in again)


async def test_a_salt_cannot_name_an_adapter(stack: Stack) -> None:
    await text(stack, "sql")
    for salt in ("sql", "sql\0", "\0sql", "sql\0\0"):
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 2, "details": True}, "cache_salt": salt}
        reply = await post(stack.client, "/generate", body)
        assert (reply["generated_text"], "cached_tokens" in reply["details"]) == (FORWARDS, False)
        await until(lambda: stack.scheduler.stats().running == 0)


@pytest.mark.parametrize("asking", [CHAT, COMPLETIONS, RESPONSES, MESSAGES], ids=lambda asking: asking.path)
async def test_the_model_of_a_request_names_an_adapter(stack: Stack, asking: Asking) -> None:
    for model, expected in (("org/french", BACKWARDS), ("echo", FORWARDS)):
        body = asking.body(PROMPT, 2) | {"model": model}
        reply = await post(stack.client, asking.path, body)
        assert expected in str(reply)
        assert reply["model"] == model
        assert expected.split()[0] in (await stack.ask(asking.path, body | {"stream": True})).body


@pytest.mark.parametrize("asking", [CHAT, COMPLETIONS], ids=lambda asking: asking.path)
async def test_a_request_of_trtllm_serve_names_an_adapter(stack: Stack, asking: Asking) -> None:
    body = asking.body(PROMPT, 2)
    asked = {"lora_name": "sql", "lora_int_id": 7, "lora_path": "/adapters/other", "lora_ckpt_source": "hf"}
    for model in ("echo", "org/french"):
        reply = await post(stack.client, asking.path, body | {"model": model, "lora_request": asked})
        assert (BACKWARDS in str(reply), reply["model"]) == (True, model)
    for name in ("echo", "other", ""):
        refused = await stack.ask(asking.path, body | {"lora_request": {"lora_name": name}})
        assert refused.status == (404 if name else 400), refused


async def test_models_lists_adapters_with_their_parents(stack: Stack) -> None:
    listed = (await stack.ask("/v1/models")).body["data"]
    assert [(each["id"], each["root"], each["parent"]) for each in listed] == [
        ("echo", "echo", None),
        ("sql", "echo", "echo"),
        ("org/french", "echo", "echo"),
    ]
    assert (await stack.ask("/v1/models/org/french")).body == listed[2]
