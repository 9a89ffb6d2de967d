"""kill -9 of any process, at load: nothing is left behind, and every stream ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import psutil
import pytest
from stack import running
from streams import Streams

from text_generation_proto.exit_codes import ExitCode

pytestmark = pytest.mark.system

STREAMS = 64
ALL_ENDED = 2.0
"""Seconds from the kill until no stream is open and no process is left."""

EXIT_CODES = {"launcher": -9, "router": ExitCode.DEPENDENCY_LOST, "shard": ExitCode.DEPENDENCY_LOST}


@pytest.mark.parametrize("victim", ["launcher", "router", "shard"])
async def test_a_killed_process_takes_all_others_with_it(victim: str, demo_model: Path) -> None:
    with running(demo_model, "--echo-step-ms", "10", "--max-shard-restarts", "0") as stack:
        loop = asyncio.get_running_loop()
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
            streams = Streams(session, tasks)
            await streams.open(stack.url, STREAMS, max_new_tokens=6000)  # a minute
            assert all(stream.end is None for stream in streams.streams)
            children = stack.children()
            # The shard, the router, and its four workers: two for templates, two for grammars.
            assert len(children) == 6
            stack.kill(victim)
            killed = loop.time()
            await streams.all_ended()
        assert {stream.end for stream in streams.streams} <= {"error", "closed"}
        assert max(stream.ended_at for stream in streams.streams) - killed < ALL_ENDED
        _, alive = await asyncio.to_thread(psutil.wait_procs, children, killed + ALL_ENDED - loop.time())
        # A zombie has ended, and waits for the system's first process to take notice.
        assert [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []
        assert await asyncio.to_thread(stack.wait) == EXIT_CODES[victim]
        assert stack.left_behind() == []
        if victim != "launcher":
            assert f"{victim} died" in stack.events("launcher")
