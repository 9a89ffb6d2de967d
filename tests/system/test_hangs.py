"""Hangs of shards and router: found, logged with their stacks, replaced; no stream is lost. The real processes."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from full_grid import full
from harm import SLACK
from stack import Stack, running
from streams import Streams
from tokenizers import Tokenizer

from text_generation_common.exit_codes import ExitCode

pytestmark = pytest.mark.system

STEPS = ("--echo-step-ms", "10")
HANGING_PROMPT = "six seven eight nine ten"
"""Hangs with `hangs`; the other streams have another prompt."""


def hangs(model: Path) -> dict[str, str]:
    """Return the environment of an engine that hangs at the fourth token of HANGING_PROMPT: a decode step computes it."""
    token = Tokenizer.from_file(str(model / "tokenizer.json")).encode(HANGING_PROMPT).ids[3]
    return {"CHECKED_ECHO": json.dumps({"hang_token": token})}


async def until_health(session: aiohttp.ClientSession, stack: Stack, status: int) -> float:
    """Return the seconds until /health has this status."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    async with asyncio.timeout(60):
        while True:
            async with session.get(f"{stack.url}/health") as response:
                if response.status == status:
                    return loop.time() - started
            await asyncio.sleep(0.05)


async def log_of(stack: Stack, event: str, process: str = "launcher") -> dict[str, Any]:
    """Return the first record of an event. Router and launcher may find a hang in any order."""
    for record in stack.records:
        if (record["process"], record["event"]) == (process, event):
            return record
    return await asyncio.to_thread(stack.wait_for, event, process)


@pytest.mark.parametrize(
    ("fault", "replicas", "hang_timeout"),
    [
        ("step never ends", 2, 2),
        *(full("step never ends", replicas, 15) for replicas in (2, 1)),
        *(full("stopped", replicas, seconds) for replicas, seconds in ((2, 2), (2, 15), (1, 15))),
    ],
)
async def test_streams_of_a_shard_that_hangs_move_and_it_is_restarted(
    echo_model: Path, session: aiohttp.ClientSession, fault: str, replicas: int, hang_timeout: int
) -> None:
    arguments = ("--num-replicas", str(replicas), "--hang-timeout", str(hang_timeout), *STEPS)
    with running(echo_model, *arguments, environ=hangs(echo_model)) as stack:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            streams = Streams(session, tasks)
            await streams.open(stack.url, 8, max_new_tokens=200 + 50 * hang_timeout)
            began = loop.time()
            if fault == "stopped":
                stack.shard(0).suspend()
            else:
                await streams.open(stack.url, 1, max_new_tokens=50, inputs=HANGING_PROMPT)
            if replicas == 1:
                assert await until_health(session, stack, 503) < 6.5 * SLACK
            hang = await log_of(stack, "child hangs")
            await log_of(stack, "shard lost", "router")
            assert loop.time() - began < hang_timeout + 0.5 * SLACK
            died = await log_of(stack, "shard died")
            assert (died["replica"], died["signal"]) == (int(hang["child"][-1]), "SIGABRT")
            await log_of(stack, "shard serves again")
            await until_health(session, stack, 200)
            assert loop.time() - began < hang_timeout + 5 * SLACK
            await streams.all_ended()
        texts = {(stream.inputs, stream.end, stream.text) for stream in streams.streams}
        assert {end for _, end, _ in texts} == {"finished"}
        assert len(texts) == (1 if fault == "stopped" else 2)
        assert all(text.startswith(2 * inputs) for inputs, _, text in texts)
        assert all(stream.tokens > 10 for stream in streams.streams)
        dump = stack.output(hang["child"])
        assert "Fatal Python error: Aborted" in dump
        assert "engines/echo.py" in dump, "the stack of the engine's thread is logged"
        assert stack.events("launcher").count("child hangs") == 1


@pytest.mark.full
async def test_a_pause_and_a_long_prompt_are_no_hangs(echo_model: Path, session: aiohttp.ClientSession) -> None:
    """A shard that is stopped for less than --hang-timeout goes on; so does one that computes a prompt for longer."""
    slow_prompt = 40 * HANGING_PROMPT  # nothing of it is cached
    # 200 tokens: 6 s. None takes longer than a decode step.
    speed = ("--echo-step-ms", "35", "--echo-prefill-us", "30000")
    with running(echo_model, *speed, "--hang-timeout", "3") as stack:
        shard = stack.shard(0)
        async with asyncio.TaskGroup() as tasks:
            streams = Streams(session, tasks)
            await streams.open(stack.url, 4, max_new_tokens=100)
            shard.suspend()
            await asyncio.sleep(1.5)
            shard.resume()
            await streams.all_ended()
            await streams.open(stack.url, 1, max_new_tokens=10, inputs=slow_prompt)
            await streams.all_ended()
        assert [stream.end for stream in streams.streams] == ["finished"] * 5
        stack.launcher.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(stack.wait) == ExitCode.STOPPED
        assert "a step takes long" in stack.events("shard-0")
        assert "child hangs" not in stack.events("launcher")
        assert "shard lost" not in stack.events("router")
