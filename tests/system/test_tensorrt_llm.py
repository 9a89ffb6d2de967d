"""The whole stack over TensorRT-LLM's stand-in, in both versions: generate, stream, chat, cancel, overload, drain, kill."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from stack import Stack, running
from standin import VERSIONS, path_of, read_log
from streams import Streams

from text_generation_proto.exit_codes import ExitCode

pytestmark = pytest.mark.system

WORDS = "one two three four five"


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


@contextmanager
def serving(model: Path, version: str, *args: str, log: Path | None = None, **settings: object) -> Iterator[Stack]:
    """A stack that is ready; `settings` are the stand-in's."""
    environ = {"PYTHONPATH": str(path_of(version))}
    environ |= {f"TRTLLM_STANDIN_{name.upper()}": str(value) for name, value in settings.items()}
    if log is not None:
        environ["TRTLLM_STANDIN_LOG"] = str(log)
    with running(model, *args, engine="tensorrt-llm", environ=environ) as stack:
        yield stack


async def post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with session.post(url, json=body) as response:
        return response.status, await response.json()


async def test_generate_stream_and_chat(demo_model: Path, version: str, session: aiohttp.ClientSession) -> None:
    with serving(demo_model, version) as stack:
        body: dict[str, Any] = {"inputs": WORDS, "parameters": {"max_new_tokens": 5, "details": True}}
        status, answer = await post(session, f"{stack.url}/generate", body)
        assert (status, answer["generated_text"]) == (200, WORDS)
        assert answer["details"]["finish_reason"] == "length"
        assert all(token["logprob"] <= 0 for token in answer["details"]["tokens"])
        pieces = []
        async with session.post(f"{stack.url}/generate_stream", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data:"):
                    pieces.append(json.loads(line[5:]))
        assert "".join(piece["token"]["text"] for piece in pieces) == WORDS
        assert pieces[-1]["generated_text"] == WORDS
        chat: dict[str, Any] = {
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 9,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 2,
        }
        status, answer = await post(session, f"{stack.url}/v1/chat/completions", chat)
        assert status == 200
        assert answer["usage"]["completion_tokens"] == 9
        tops = [token["top_logprobs"] for token in answer["choices"][0]["logprobs"]["content"]]
        assert {len(top) for top in tops} == {2}
        async with session.get(f"{stack.url}/info") as response:
            assert response.status == 200


async def test_a_grammar_is_kept(demo_model: Path, version: str, session: aiohttp.ClientSession) -> None:
    with serving(demo_model, version) as stack:
        grammar = {"type": "regex", "value": "(yes|no), [0-9]{3}"}
        body = {"inputs": WORDS, "parameters": {"max_new_tokens": 20, "grammar": grammar}}
        status, answer = await post(session, f"{stack.url}/generate", body)
        assert status == 200, answer
        assert answer["generated_text"][:2] in ("ye", "no")
        assert answer["generated_text"][-3:].isdigit()


async def test_what_cannot_be_had_is_refused_by_name(
    demo_model: Path, version: str, session: aiohttp.ClientSession
) -> None:
    with serving(demo_model, version) as stack:
        refused = {"typical_p": 0.5}
        if version == "1.2":
            refused |= {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "seed": 7}
        for name, value in refused.items():
            parameters = {"max_new_tokens": 5, "do_sample": True, name: value}
            status, answer = await post(session, f"{stack.url}/generate", {"inputs": WORDS, "parameters": parameters})
            assert status == 422
            assert f"`{name}` is not supported by this engine" in answer["error"]


async def test_a_client_that_leaves_has_its_request_aborted(
    demo_model: Path, version: str, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with serving(demo_model, version, log=log, step_ms=5) as stack:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(8):
                tasks.create_task(leave_early(session, stack.url))
        async with asyncio.timeout(20):
            while read_log(log).unfinished:  # noqa: ASYNC110 - another process says so in a file
                await asyncio.sleep(0.02)
        assert read_log(log).ends["cancelled"] == 8


async def leave_early(session: aiohttp.ClientSession, url: str) -> None:
    body = {"inputs": WORDS, "parameters": {"max_new_tokens": 5000}}
    async with session.post(f"{url}/generate_stream", json=body) as response:
        await response.content.readline()


async def test_one_request_too_many_is_refused(demo_model: Path, version: str, session: aiohttp.ClientSession) -> None:
    with serving(demo_model, version, "--max-concurrent-requests", "4", step_ms=20) as stack:
        async with asyncio.TaskGroup() as tasks:
            streams = Streams(session, tasks)
            await streams.open(stack.url, 4, max_new_tokens=60)
            body = {"inputs": WORDS, "parameters": {"max_new_tokens": 1}}
            async with session.post(f"{stack.url}/generate", json=body) as response:
                assert response.status == 429
                assert int(response.headers["retry-after"]) >= 1
            await streams.all_ended()
        assert {(stream.end, stream.tokens) for stream in streams.streams} == {("finished", 60)}


async def test_more_than_run_at_once_wait_in_the_routers_queue(
    demo_model: Path, version: str, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with serving(demo_model, version, "--max-batch-size", "4", log=log, step_ms=2) as stack:
        async with asyncio.TaskGroup() as tasks:
            streams = Streams(session, tasks)
            await streams.open(stack.url, 20, max_new_tokens=30)
            await streams.all_ended()
        assert {(stream.end, stream.tokens) for stream in streams.streams} == {("finished", 30)}
    entries = read_log(log)
    assert (entries.ends["length"] >= 20, entries.unfinished) == (True, set())


async def test_sigterm_lets_running_streams_finish_and_the_engine_shuts_down(
    demo_model: Path, version: str, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with serving(demo_model, version, log=log, step_ms=20) as stack:
        children = stack.children()
        async with asyncio.TaskGroup() as tasks:
            streams = Streams(session, tasks)
            await streams.open(stack.url, 16, max_new_tokens=50)
            stack.launcher.send_signal(signal.SIGTERM)
            await streams.all_ended()
        assert {(stream.end, stream.tokens) for stream in streams.streams} == {("finished", 50)}
        assert await asyncio.to_thread(stack.wait) == ExitCode.STOPPED
        assert psutil.wait_procs(children, timeout=5)[1] == []
        assert stack.left_behind() == []
    assert read_log(log).of("shutdown")


def test_an_engine_that_hangs_when_it_is_to_end_is_ended(demo_model: Path, version: str) -> None:
    with serving(demo_model, version, "--shutdown-timeout", "1", hang_shutdown=1, workers=1) as stack:
        children = stack.children()
        stack.launcher.send_signal(signal.SIGTERM)
        assert stack.wait() == ExitCode.STOPPED
        _, alive = psutil.wait_procs(children, timeout=5)
        assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.parametrize("victim", ["launcher", "router", "shard"])
async def test_a_killed_process_leaves_nothing_behind(
    victim: str, demo_model: Path, version: str, session: aiohttp.ClientSession
) -> None:
    with serving(demo_model, version, "--max-shard-restarts", "0", step_ms=10, workers=1) as stack:
        async with asyncio.TaskGroup() as tasks:
            streams = Streams(session, tasks)
            await streams.open(stack.url, 16, max_new_tokens=3000)
            children = stack.children()
            stack.kill(victim)
            await streams.all_ended()
        assert {stream.end for stream in streams.streams} <= {"error", "closed"}
        _, alive = await asyncio.to_thread(psutil.wait_procs, children, 20)
        assert [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.parametrize("victim", ["shard", "worker"])
async def test_streams_go_on_when_the_engine_is_lost(
    victim: str, demo_model: Path, version: str, session: aiohttp.ClientSession
) -> None:
    """A shard that is killed, or its worker process, which nobody else would notice."""
    with serving(demo_model, version, "--num-replicas", "2", step_ms=10, workers=1) as stack:
        async with asyncio.TaskGroup() as tasks:
            streams = Streams(session, tasks)
            await streams.open(stack.url, 16, max_new_tokens=200)
            if victim == "shard":
                stack.kill("shard", 0)
            else:
                below = stack.shard(0).children(recursive=True)
                next(child for child in below if "mpi4py.futures.server" in child.cmdline()).kill()
            await streams.all_ended()
        assert {(stream.end, stream.tokens) for stream in streams.streams} == {("finished", 200)}
        await asyncio.to_thread(stack.wait_for, "shard serves again")
