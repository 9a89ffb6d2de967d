"""Chats of a model with states: a turn computes what differs from the prompt before, and at most one block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from os.path import commonprefix
from pathlib import Path
from random import Random
from typing import Any

import pytest
from checked_echo import CheckedEcho
from http_stack import LIMITS, Stack, serve, until
from pictures import TEMPLATE, data_uri, image_model, picture
from seeing_echo import WITH_IMAGES, echo_with_images
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


async def test_the_tokens_of_an_image_count_where_the_next_turn_does_not_repeat_it(tmp_path: Path) -> None:
    """The template moves the tools into the last question, before its image; the result of a call does not move them."""
    last_question = "(messages | selectattr('role', 'equalto', 'user') | list)[-1]"
    moving = TEMPLATE.replace("]{%", f"]{{% if m == {last_question} %}}{{{{ tools or '' }}}}{{% endif %}}{{%", 1)
    limits, few = replace(WITH_IMAGES, marks_turns=True), (CacheGroup(4, is_state=True),)
    build = partial(echo_with_images, further_groups=few)
    look: Json = {"type": "image_url", "image_url": {"url": data_uri(picture(300, 200))}}
    called: list[Json] = [
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "It is red.", "tool_call_id": CALL["id"]},
    ]
    turns: list[list[Json]] = [
        [{"role": "user", "content": "Hello" * 64}],
        [
            {"role": "assistant", "content": "Hi."},
            {"role": "user", "content": [look, {"type": "text", "text": "Why?"}]},
        ],
        called,
        [{"role": "assistant", "content": "So."}, {"role": "user", "content": "And?"}],
    ]
    async with serve(image_model(tmp_path), limits=limits, chat_template=moving, build=build) as stack:
        messages, lengths, cached = list[Json](), list[int](), list[int]()
        # Another chat leaves a checkpoint, so no block of states is free for a spare one of the second turn.
        other = {"messages": [{"role": "user", "content": "Other" * 64}], "max_tokens": 1}
        await post(stack.client, "/v1/chat/completions", other)
        await until(lambda: stack.scheduler.stats().running == 0)
        for turn in turns:
            messages += turn
            body = {"messages": messages, "tools": [TOOL], "max_tokens": 1}
            usage = (await post(stack.client, "/v1/chat/completions", body))["usage"]
            await until(lambda: stack.scheduler.stats().running == 0)
            lengths.append(usage["prompt_tokens"])
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[2] == (lengths[1] - len("nswer]")) // BLOCK * BLOCK
    assert cached[3] == len("[user]" + "Hello" * 64 + "[assistant]Hi.[user]") // BLOCK * BLOCK
