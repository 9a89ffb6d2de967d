"""Chats of a model with states: a turn computes what differs from the prompt before, and at most one block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from os.path import commonprefix
from pathlib import Path
from random import Random
from typing import Any

import pytest
from checked_echo import CheckedEcho
from http_stack import LIMITS, Stack, serve, until
from sse_client import post

from text_generation_proto.cache_groups import CacheGroup
from text_generation_shard.config import ShardConfig

Json = dict[str, Any]
TEMPLATES = Path(__file__).parents[1] / "unit/router/chat/templates"
BLOCK = 16
TURNS = 3
BY_CHANCE = 1
"""Tokens that <think> and <tool_call> share, in a tokenizer that has none for them."""
TOOL: Json = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL: Json = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def build(config: ShardConfig) -> CheckedEcho:
    return CheckedEcho.build(config, further_groups=(CacheGroup(60, is_state=True),))


def words(random: Random) -> str:
    return " ".join(random.choice(["the", "and", "of", "to", "in"]) for _ in range(random.choice([1, 7, 16, 30])))


def conversations(random: Random, *, system: bool, tools: bool) -> Iterator[list[Json]]:
    """Yield the messages of each turn: questions, and in a chat with tools the results of calls."""
    messages: list[Json] = [{"role": "system", "content": words(random)}] if system else []
    for _ in range(TURNS):
        messages.append({"role": "user", "content": words(random)})
        for _ in range(random.choice([1, 2]) if tools else 0):
            yield list(messages)
            messages.append(
                {"role": "assistant", "content": "", "reasoning_content": words(random), "tool_calls": [CALL]}
            )
            messages.append({"role": "tool", "content": words(random), "tool_call_id": CALL["id"]})
        yield list(messages)
        messages.append({"role": "assistant", "content": words(random), "reasoning_content": words(random)})


async def check(stack: Stack, random: Random, *, system: bool, tools: bool) -> None:
    before: list[int] = []
    for messages in conversations(random, system=system, tools=tools):
        body = {"messages": messages, **({"tools": [TOOL]} if tools else {})}
        prompt = [token["id"] for token in (await post(stack.client, "/chat_tokenize", body))["tokenize_response"]]
        usage = (await post(stack.client, "/v1/chat/completions", body | {"max_tokens": 2}))["usage"]
        await until(lambda: stack.scheduler.stats().running == 0)
        computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        new = len(prompt) - len(commonprefix([before, prompt]))  # noqa: RUF071 – of tokens
        assert usage["prompt_tokens"] == len(prompt)
        # Of `training`, which shows eight messages, later prompts are the same.
        assert computed <= new + BLOCK + BY_CHANCE or prompt == before, messages
        before = prompt


@pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
async def test_a_turn_computes_its_new_tokens_and_at_most_one_block(demo_model: Path, name: str) -> None:
    template = (TEMPLATES / f"{name}.jinja").read_text()
    limits = replace(LIMITS, marks_turns=True)
    async with serve(demo_model, limits=limits, chat_template=template, build=build) as stack:
        random = Random(name)
        for system, tools in product((False, True), repeat=2):
            if name != "gemma" or not (system or tools):  # it refuses both
                await check(stack, random, system=system, tools=tools)
