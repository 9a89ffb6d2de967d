"""Images in every dialect with the clients of each, their tokens, the prefix cache, and every way that one is refused."""

from __future__ import annotations

import asyncio
import base64
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from http_stack import Stack, serve
from huggingface_hub import AsyncInferenceClient
from openai import AsyncOpenAI
from pictures import data_uri, image_model, picture, tokens_of
from seeing_echo import WITH_IMAGES, echo_with_images

from text_generation_router.media import reader
from text_generation_router.media.fetch import MAX_URL
from text_generation_router.request import TenantId

pytestmark = pytest.mark.asyncio(loop_scope="module")

RED, BLUE = picture(300, 200), picture(300, 200, "blue")
IMAGE_TOKENS = tokens_of(300, 200)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    model = image_model(tmp_path_factory.mktemp("model"))
    async with serve(model, limits=WITH_IMAGES, build=echo_with_images) as running:
        yield running


def part(data: bytes | str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data if isinstance(data, str) else data_uri(data)}}


def chat(*content: dict[str, Any] | str) -> dict[str, Any]:
    parts = [{"type": "text", "text": each} if isinstance(each, str) else each for each in content]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 3}


async def usage(stack: Stack, *content: dict[str, Any] | str) -> tuple[int, int]:
    """Return the tokens of a chat's prompt, and those that were cached."""
    reply = await stack.ask("/v1/chat/completions", chat(*content))
    assert reply.status == 200, reply
    counts = reply.body["usage"]
    return counts["prompt_tokens"], counts["prompt_tokens_details"]["cached_tokens"]


async def test_openais_client_sends_pictures(stack: Stack) -> None:
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{stack.port}/v1", api_key="-", max_retries=0) as client:
        await ask_openai(client)


async def ask_openai(client: AsyncOpenAI) -> None:
    text = len("[user]What?[answer]")
    messages: Any = []
    for kind in ("png", "jpeg", "webp", "gif"):
        url = data_uri(picture(300, 200, kind=kind), f"image/{kind}")
        messages = [{"role": "user", "content": [part(url), {"type": "text", "text": "What?"}]}]
        answer = await client.chat.completions.create(model="tgi", messages=messages, max_tokens=3)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == text + IMAGE_TOKENS
    content: Any = [
        {"type": "input_image", "image_url": data_uri(RED), "detail": "low"},
        {"type": "input_text", "text": "What?"},
    ]
    response = await client.responses.create(
        model="tgi", input=[{"role": "user", "content": content}], max_output_tokens=3
    )
    assert response.usage is not None
    assert response.usage.input_tokens == text + IMAGE_TOKENS
    streamed = await client.chat.completions.create(model="tgi", messages=messages, max_tokens=3, stream=True, n=2)
    assert len([chunk async for chunk in streamed]) > 2


async def test_anthropics_client_sends_pictures(stack: Stack) -> None:
    encoded = base64.b64encode(RED).decode()
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}}
    messages: Any = [
        {"role": "user", "content": [image, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [image]}]},
    ]
    expected = len("[user]What?[assistant][tool][answer]") + 2 * IMAGE_TOKENS
    async with AsyncAnthropic(base_url=f"http://127.0.0.1:{stack.port}", api_key="-", max_retries=0) as client:
        answer = await client.messages.create(model="tgi", messages=messages, max_tokens=3)
        assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == expected
        assert (await client.messages.count_tokens(model="tgi", messages=messages)).input_tokens == expected


async def test_hugging_faces_client_sends_pictures_and_tgis_form_of_them(stack: Stack) -> None:
    async with AsyncInferenceClient(f"http://127.0.0.1:{stack.port}") as client:
        await ask_hugging_face(client)


async def ask_hugging_face(client: AsyncInferenceClient) -> None:
    body: Any = chat(part(RED), "What?")
    answer = await client.chat_completion(body["messages"], max_tokens=3)
    assert answer.usage.prompt_tokens == len("[user]What?[answer]") + IMAGE_TOKENS
    text = f"![]({data_uri(RED)})What?"
    generated = await client.text_generation(text, details=True, decoder_input_details=True, max_new_tokens=3)
    assert len(generated.details.prefill) == len("What?") + IMAGE_TOKENS
    # In the text of a chat, too; a link that is not fetched stays text.
    answer = await client.chat_completion([{"role": "user", "content": f"{text}![](http://a.b/c)"}], max_tokens=3)
    assert answer.usage.prompt_tokens == len("[user]What?![](http://a.b/c)[answer]") + IMAGE_TOKENS


async def test_the_case_of_the_head_of_a_data_uri_does_not_count(stack: Stack) -> None:
    scheme, comma, encoded = data_uri(picture(100, 30, compress_level=0)).partition(",")
    url = scheme.upper() + comma + encoded
    tokens = len("[user]What?[answer]") + tokens_of(100, 30)
    assert len(url) > MAX_URL
    assert await usage(stack, part(url), "What?") == (tokens, 0)
    assert (await usage(stack, f"![]({url})What?"))[0] == tokens


async def test_so_many_pictures_are_looked_for_in_the_texts_of_a_request(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MAX_MARKS", 2)
    image = f"![]({data_uri(RED)})"
    texts = "![](a b", image, image
    tokens = len(f"![](a b{image}") + IMAGE_TOKENS
    generated = await stack.generate("".join(texts), details=True, decoder_input_details=True, max_new_tokens=1)
    assert len(generated["details"]["prefill"]) == tokens
    messages = [{"role": "user", "content": text} for text in texts]
    reply = await stack.ask("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert reply.body["usage"]["prompt_tokens"] == tokens + len("[user]" * 3 + "[answer]")


async def test_a_long_url_in_a_text_is_one_of_an_image(stack: Stack) -> None:
    reply = await stack.ask("/generate", {"inputs": f"![](http://a/{'b' * 3000})"})
    assert (reply.status, "does not fetch images from the host" in reply.body["error"]) == (422, True)


async def test_the_same_picture_is_a_hit_and_another_one_at_its_place_is_none(stack: Stack) -> None:
    tokens, _ = await usage(stack, "The first", part(RED), "turn")
    assert await usage(stack, "The first", part(RED), "turn, and the second") == (tokens + 16, tokens // 16 * 16)
    before = len("[user]The first") // 16 * 16
    assert await usage(stack, "The first", part(BLUE), "turn") == (tokens, before)
    assert (await usage(stack, "The first", part(BLUE), "turn"))[1] > before


async def test_sizes_decide_the_tokens_and_there_are_limits_of_them(stack: Stack) -> None:
    plain = len("[user]ab[answer]")
    for size in ((1, 1), (28, 29), (640, 480)):
        assert await usage(stack, "a", part(picture(*size)), "b") == (plain + tokens_of(*size), 0)
    reply = await stack.ask("/v1/chat/completions", chat("a", part(picture(1540, 1540)), "b"))
    assert reply.status == 400
    assert "Given: 3096 `inputs` tokens" in reply.body["error"]["message"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([part("data:image/png;base64,AAAA")], "image 1 cannot be read: it is no PNG, JPEG, WebP or GIF"),
        ([part(BLUE.replace(b"IDATx", b"IDATy"))], "image 1 cannot be read: broken"),  # which the engine finds
        ([part(RED), part(RED[:-20])], "image 2 cannot be read: its file is cut off"),
        ([part("data:image/png;base64,?")], "image 1 cannot be read: its `data:` URI is not valid base64"),
        ([part("data:image/svg+xml,<svg/>")], "image 1 cannot be read: its `data:` URI is not in base64"),
        ([part("http://127.0.0.1/a.png")], "image 1 cannot be read: this server does not fetch images from the host"),
        ([part("file:///etc/passwd")], "image 1 cannot be read: its URL is not supported"),
        ([part(RED)] * 4, "a request may have at most 3 images. Given: 4"),
        ([part(RED), "[IMG]"], "the prompt has 2 places of images for 1 images: its text must not have '[IMG]'"),
        (["[IMG]"], "the prompt has 1 places of images for 0 images"),
        ([part("")], "has no `image_url`"),
    ],
)
async def test_the_error_says_which_picture_is_wrong(stack: Stack, content: list[Any], said: str) -> None:
    body = chat(*content)
    for path, field in (("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
        reply = await stack.ask(path, {"model": "tgi", field: body["messages"]})
        assert reply.status == 400
        assert said in reply.body["error"]["message"]
        assert len(reply.body["error"]["message"]) < 250
        assert reply.body["error"]["param"] == field


async def test_truncated_prompts_keep_their_pictures(stack: Stack) -> None:
    parameters = {"truncate": 50, "max_new_tokens": 1}
    body = {"inputs": f"![]({data_uri(RED)})What?", "parameters": parameters}
    reply = await stack.ask("/generate", body)
    assert reply.status == 422
    assert "`truncate` is not supported for a prompt with images" in reply.body["error"]


async def test_a_large_picture_is_refused_before_it_is_decoded(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_BYTES", 100)
    reply = await stack.ask("/v1/chat/completions", chat(part("data:image/png;base64," + "?" * 140)))
    assert reply.status == 400
    assert "its file has more than 100 bytes" in reply.body["error"]["message"]


async def test_the_bytes_of_the_pictures_of_all_answers_are_limited(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MAX_REQUEST_BYTES", 3 * len(RED))
    body = chat(part(RED), part(RED))
    assert (await stack.ask("/v1/chat/completions", body)).status == 200
    refused = await stack.ask("/v1/chat/completions", body | {"n": 2})
    assert refused.status == 400
    assert "image 2 cannot be read: with it, the images of all answers have" in refused.body["error"]["message"]


async def test_the_pictures_of_a_prompt_that_is_counted_need_a_permit(stack: Stack) -> None:
    tenant = TenantId("")
    stack.permits.hold(stack.permits.limit, tenant)
    try:
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(RED).decode()}
        for content, status in (([{"type": "image", "source": source}], 429), ("What?", 200)):
            body = {"model": "tgi", "messages": [{"role": "user", "content": content}]}
            assert (await stack.ask("/v1/messages/count_tokens", body)).status == status
    finally:
        stack.permits.give_back(stack.permits.limit, tenant)


async def test_a_tenant_does_not_hold_all_memory_of_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_HELD_BYTES", 0)
    monkeypatch.setattr(reader, "MAX_REQUEST_BYTES", 3 * len(RED))
    async with serve(
        image_model(tmp_path), limits=WITH_IMAGES, build=echo_with_images, linked=True, echo_step_ms=50
    ) as stack:
        body = chat(part(RED), part(RED)) | {"max_tokens": 500}
        async with stack.client.post("/v1/chat/completions", json=body | {"stream": True}) as running:
            assert running.status == 200
            refused = await stack.ask("/v1/chat/completions", body)
            assert refused.status == 429, refused
            other = await stack.ask("/v1/chat/completions", chat(part(RED)), {"x-tenant-id": "other"})
            assert other.status == 200, other
        async with asyncio.timeout(20):
            while (await stack.ask("/v1/chat/completions", chat(part(RED), part(BLUE)))).status != 200:
                gc.collect()
