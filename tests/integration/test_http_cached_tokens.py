"""Cached tokens are reported in every dialect, and only shared under the same salt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import text_generation.types
from anthropic.types import Usage as AnthropicUsage
from checked_echo import CheckedEcho
from every_dialect import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, VERBATIM, Asking, stream_data
from http_stack import LIMITS, Stack, serve, served, until
from huggingface_hub import TextGenerationOutput, TextGenerationStreamOutput
from openai.types import CompletionUsage
from openai.types.responses import ResponseUsage
from sse_client import chunks, post

from text_generation_proto.cache_groups import CacheGroup
from text_generation_shard.config import ShardConfig

Json = dict[str, Any]
PROMPT = 200
"""Tokens of each text: several blocks and a remainder."""
WORDS = iter([" the", " and", " to", " in", " is", " that", " for", " it", " was", " on"])
"""Each is one token."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


stack = served(chat_template=VERBATIM)


@pytest.fixture
def text() -> str:
    """Return a text that no other test has sent."""
    return next(WORDS) * PROMPT


async def cached(stack: Stack, text: str, headers: dict[str, str] | None = None, **fields: object) -> int:
    """Return the cached tokens of another request with the same text, after it has ended."""
    body = GENERATE.body(text, 1) | fields
    reply = await stack.ask("/generate", body, headers)
    told = int(reply.headers["x-cached-tokens"])
    assert reply.body["details"].get("cached_tokens", 0) == told
    await until(lambda: stack.scheduler.stats().running == 0)
    return told


async def test_whole_blocks_are_cached_and_the_last_token_is_always_computed(stack: Stack, text: str) -> None:
    assert await cached(stack, text) == 0
    found = await cached(stack, text)
    block = stack.scheduler.stats().block_size
    assert found % block == 0
    assert PROMPT - block <= found < PROMPT


async def test_tgis_clients_accept_the_additional_field(stack: Stack, text: str) -> None:
    await cached(stack, text)
    found = await cached(stack, text)
    reply = await post(stack.client, "/generate", GENERATE.body(text, 2))
    assert reply["details"]["cached_tokens"] == found > 0
    assert text_generation.types.Response(**reply).details.generated_tokens == 2
    assert TextGenerationOutput.parse_obj_as_instance(reply).details.generated_tokens == 2
    last = stream_data((await stack.ask("/generate_stream", GENERATE.body(text, 2))).body.encode())[-1]
    assert last["details"]["cached_tokens"] == found
    assert text_generation.types.StreamResponse(**last).details.generated_tokens == 2
    assert TextGenerationStreamOutput.parse_obj_as_instance(last).details.generated_tokens == 2


def last_chunk(events: list[Json]) -> Json:
    return events[-1]["usage"]


def response_usage(events: list[Json]) -> Json:
    return events[-1]["response"]["usage"]


def message_usage(events: list[Json]) -> Json:
    start, *_, delta, _ = events
    assert start["message"]["usage"] == delta["usage"] | {"output_tokens": 0}
    return delta["usage"]


def details(usage: Json) -> tuple[int, int]:
    model = CompletionUsage.model_validate(usage)
    assert model.prompt_tokens_details is not None
    return model.prompt_tokens_details.cached_tokens or 0, model.prompt_tokens


def input_details(usage: Json) -> tuple[int, int]:
    model = ResponseUsage.model_validate(usage)
    return model.input_tokens_details.cached_tokens, model.input_tokens


def anthropics_sum(usage: Json) -> tuple[int, int]:
    model = AnthropicUsage.model_validate(usage)
    found, written = model.cache_read_input_tokens or 0, model.cache_creation_input_tokens or 0
    return found, model.input_tokens + found + written


@pytest.mark.parametrize(
    ("asking", "streamed_usage", "read"),
    [
        (CHAT, last_chunk, details),
        (COMPLETIONS, last_chunk, details),
        (RESPONSES, response_usage, input_details),
        (MESSAGES, message_usage, anthropics_sum),
    ],
    ids=["chat", "completions", "responses", "messages"],
)
async def test_the_usage_has_the_cached_and_all_prompt_tokens(
    stack: Stack,
    text: str,
    asking: Asking,
    streamed_usage: Callable[[list[Json]], Json],
    read: Callable[[Json], tuple[int, int]],
) -> None:
    fresh = await post(stack.client, asking.path, asking.body(text, 3))
    assert read(fresh["usage"]) == (0, PROMPT)
    await until(lambda: stack.scheduler.stats().running == 0)
    usage = (await post(stack.client, asking.path, asking.body(text, 3)))["usage"]
    found, prompt = read(usage)
    assert 0 < found < prompt == PROMPT
    body = asking.streamed(text, 3)
    if asking in (CHAT, COMPLETIONS):
        body["stream_options"] = {"include_usage": True}
    assert streamed_usage(stream_data((await stack.ask(asking.path, body)).body.encode())) == usage


async def test_a_prompt_with_several_choices_counts_once(stack: Stack, text: str) -> None:
    body = {**COMPLETIONS.body(text, 2), "prompt": [text, " of" * PROMPT], "n": 3}
    fresh = (await post(stack.client, COMPLETIONS.path, body))["usage"]
    await until(lambda: stack.scheduler.stats().running == 0)
    again = (await post(stack.client, COMPLETIONS.path, body))["usage"]
    assert fresh["prompt_tokens_details"] == {"cached_tokens": 0}
    found = again["prompt_tokens_details"]["cached_tokens"]
    assert found == 2 * await cached(stack, text)
    stream = await chunks(stack.client, COMPLETIONS.path, body | {"stream_options": {"include_usage": True}})
    assert stream[-1]["usage"] == again


async def test_another_salt_shares_nothing(stack: Stack, text: str) -> None:
    assert await cached(stack, text, cache_salt="a") == 0
    assert await cached(stack, text, cache_salt="b") == 0
    assert await cached(stack, text) == 0
    assert await cached(stack, text, parameters={"max_new_tokens": 1, "details": True, "cache_salt": "a"}) > 0


@pytest.mark.parametrize("shared", [False, True])
async def test_a_tenant_learns_nothing_of_the_prompts_of_others(demo_model: Path, text: str, shared: bool) -> None:
    settings: Json = {"api_key": ["alice", "bob"]} | ({"prefix_cache_per_tenant": False} if shared else {})
    async with serve(demo_model, settings=settings) as stack:
        alice, bob = ({"authorization": f"Bearer {name}"} for name in ("alice", "bob"))
        assert await cached(stack, text, alice) == 0
        assert await cached(stack, text, alice) > 0
        hits = stack.scheduler.stats().hit_tokens
        assert await cached(stack, text, bob) == 0
        assert (stack.scheduler.stats().hit_tokens > hits) is shared
        assert await cached(stack, text, bob) > 0
        longer = text + " a" * 40
        assert await cached(stack, longer, alice) < PROMPT
        assert await cached(stack, longer, bob) < PROMPT


WITHOUT_REASONING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>reason first{% endif %}"
)


async def test_the_end_of_a_turn_crosses_the_link_of_http_workers(demo_model: Path) -> None:
    """The next turn has no reasoning: it differs from the first one in the start of the answer."""

    def build(config: ShardConfig) -> CheckedEcho:
        return CheckedEcho.build(config, further_groups=(CacheGroup(20, is_state=True),))

    limits = replace(LIMITS, marks_turns=True)
    async with serve(demo_model, limits=limits, chat_template=WITHOUT_REASONING, build=build, linked=True) as stack:
        messages = [{"role": "user", "content": " the" * PROMPT}]
        first = await post(stack.client, "/v1/chat/completions", {"messages": messages, "max_tokens": 3})
        messages += [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": " and again"}]
        await until(lambda: stack.scheduler.stats().running == 0)
        second = await post(stack.client, "/v1/chat/completions", {"messages": messages, "max_tokens": 3})
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert PROMPT - 16 <= cached < first["usage"]["prompt_tokens"]
