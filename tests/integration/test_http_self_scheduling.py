"""An engine that schedules for itself, behind HTTP: salts for its own prefix cache, its own queue, and the loss of its shard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from caching_echo import CachingEcho
from checked_echo import CheckedEcho, RecordingEcho, recording
from http_stack import Stack, serve
from self_scheduling_echo import SelfSchedulingEcho
from sse_client import post

from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, Failure, Orders

Json = dict[str, Any]


class Salted(SelfSchedulingEcho):
    """Remembers the salts it was told of."""

    def __init__(self, engine: CheckedEcho, tokens_per_report: int) -> None:
        super().__init__(engine, tokens_per_report)
        self.salts: list[str] = []

    def apply(self, orders: Orders) -> list[Failure]:
        self.salts += [admission.cache_salt for admission in orders.placements]
        return super().apply(orders)


async def salts(stack: Stack, *asked: tuple[str, str | None]) -> list[str]:
    """Return the salts that the engine got for each (tenant, salt)."""
    for tenant, salt in asked:
        body = {"inputs": "Hello", "parameters": {"max_new_tokens": 1}}
        headers = {"x-llm-d-inference-fairness-id": tenant}
        body |= {} if salt is None else {"cache_salt": salt}
        assert (await stack.ask("/generate", body, headers)).status == 200
    assert isinstance(stack.engine, Salted)
    return stack.engine.salts


async def test_tenants_that_are_kept_apart_are_so_in_the_engine_and_not_by_name(demo_model: Path) -> None:
    async with serve(demo_model, chats=False, build=Salted.build, settings={"prefix_cache_per_tenant": True}) as stack:
        told = await salts(stack, ("acme", None), ("umbrella", None), ("acme", None), ("acme", "pepper"))
    assert told[0] == told[2]
    assert len({*told}) == 3
    assert not any(name in one for one in told for name in ("acme", "umbrella", "pepper"))


async def test_where_the_router_keeps_the_prefix_cache_no_salt_leaves_it(demo_model: Path) -> None:
    async with serve(demo_model, chats=False, build=recording()) as stack:
        assert await stack.generate("Hello", max_new_tokens=1, cache_salt="pepper")
        assert isinstance(stack.engine, RecordingEcho)
        assert [each.cache_salt for each in stack.engine.placements] == [""]


async def events(response: aiohttp.ClientResponse) -> list[Json]:
    """The rest of a stream."""
    return [orjson.loads(line.removeprefix(b"data:")) async for line in response.content if line.startswith(b"data:")]


def self_scheduling(config: ShardConfig) -> Engine:
    return SelfSchedulingEcho.build(config)


@pytest.mark.parametrize(("build", "moves"), [(self_scheduling, False), (CheckedEcho.build, True)])
async def test_a_constrained_answer_moves_only_where_the_engine_can_go_on_with_it(
    echo_model: Path, build: Callable[[ShardConfig], Engine], moves: bool
) -> None:
    grammar = {"type": "regex", "value": "[ab]{150}"}
    async with serve(echo_model, build=build, grammars=True, echo_step_ms=5) as stack:
        constrained = {"inputs": "Say it", "parameters": {"max_new_tokens": 200, "grammar": grammar}}
        free = {"inputs": "one two three", "parameters": {"max_new_tokens": 150}}
        async with (
            stack.client.post("/generate_stream", json=constrained) as bound,
            stack.client.post("/generate_stream", json=free) as unbound,
        ):
            assert (bound.status, unbound.status) == (200, 200)
            # Both have begun: an answer's headers come with its first token.
            stack.stop_shard()
            ended, went_on = await events(bound), await events(unbound)
        assert went_on[-1]["generated_text"].startswith("one two threeone two three")
        assert len(went_on) == 150
        if moves:
            assert ended[-1]["generated_text"].strip("ab") == ""
            assert len(ended[-1]["generated_text"]) == 150
        else:
            assert ended[-1] == {
                "error": "Request failed during generation: lost its shard; a constrained answer cannot go on elsewhere",
                "error_type": "generation",
            }
            assert 0 < len(ended) < 150
        await stack.assert_empty()


async def told(stack: Stack, tenant: str, text: str = " one two" * 60) -> int:
    """Return the cached tokens that an answer of four tokens tells."""
    headers = {"x-llm-d-inference-fairness-id": tenant}
    body = {"inputs": text, "parameters": {"max_new_tokens": 4, "details": True}}
    reply = await stack.ask("/generate", body, headers)
    cached = int(reply.headers["x-cached-tokens"])
    assert reply.body["details"].get("cached_tokens", 0) == cached
    async with stack.client.post("/generate_stream", json=body, headers=headers) as response:
        assert (await events(response))[-1]["details"].get("cached_tokens", 0) == cached
    return cached


async def test_cached_tokens_that_the_engine_finds_are_told_and_counted(demo_model: Path) -> None:
    async with serve(demo_model, chats=False, build=CachingEcho.build) as stack:
        assert isinstance(stack.engine, CachingEcho)
        assert await told(stack, "") == 0
        stack.engine.found = 77
        assert await told(stack, "") == 77
        assert stack.scheduler.stats().hit_tokens == 2 * 77
        usage = (await post(stack.client, "/v1/completions", {"prompt": " a", "max_tokens": 3}))["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"], "never more than there are"
        await stack.assert_empty()


async def test_tenants_that_share_the_engines_cache_learn_nothing_of_each_other(demo_model: Path) -> None:
    async with serve(
        demo_model, chats=False, build=CachingEcho.build, settings={"prefix_cache_per_tenant": False}
    ) as stack:
        assert isinstance(stack.engine, CachingEcho)
        assert await told(stack, "acme") == 0
        stack.engine.found = 77
        body = {"inputs": " one two" * 60, "parameters": {"max_new_tokens": 4}}
        other = await stack.ask("/generate", body, {"x-llm-d-inference-fairness-id": "b"})
        assert other.headers["x-cached-tokens"] == "0"
        assert await told(stack, "acme") == 77
