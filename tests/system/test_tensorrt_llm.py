"""The whole server over TensorRT-LLM's stand-in: parameters, cancellation, shutdown, lost processes."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from full_grid import full
from lora_folder import an_adapter
from stack import Stack, running, still_running
from standin import VERSIONS, python_path, read_log
from streams import Streams

from text_generation_common.exit_codes import ExitCode

pytestmark = pytest.mark.system

WORDS = "one two three four five"
EOS = 2
"""The EOS token of the demo model."""
MAX_BATCH_SIZE = 4


@contextmanager
def serving(model: Path, version: str, *args: str, log: Path | None = None, **settings: object) -> Iterator[Stack]:
    """Run a stack and yield it once it is ready; `settings` are those of the stand-in."""
    environ = {"PYTHONPATH": python_path(version)}
    environ |= {f"TRTLLM_STANDIN_{name.upper()}": str(value) for name, value in settings.items()}
    if log is not None:
        environ["TRTLLM_STANDIN_LOG"] = str(log)
    with running(model, *args, engine="tensorrt-llm", environ=environ) as stack:
        yield stack


class Server:
    """A stack for several tests, and the requests that reached its engine."""

    def __init__(self, version: str, stack: Stack, log: Path, model: str) -> None:
        self.version = version
        self.url = stack.url
        self.log = log
        self.model = model

    async def post(self, session: aiohttp.ClientSession, route: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return status and answer."""
        async with session.post(self.url + route, json=body) as response:
            return response.status, await response.json()

    async def arrival(self, session: aiohttp.ClientSession, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the request that arrives at the engine."""
        before = len(read_log(self.log).of("request"))
        status, answer = await self.post(session, route, body)
        assert status == 200, answer
        (request,) = read_log(self.log).of("request")[before:]
        return dict(request)


@pytest.fixture(scope="module", params=[*map(full, VERSIONS[:-1]), VERSIONS[-1]])
def server(
    request: pytest.FixtureRequest, echo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("standin")
    log = folder / "log"
    flags = ("--max-batch-size", str(MAX_BATCH_SIZE), f"--lora-adapters=sql={an_adapter(folder / 'sql', q_proj=576)}")
    an_adapter(folder / "modules-french", q_proj=576)
    flags += ("--lora-modules-dir", str(folder))
    with serving(echo_model, request.param, *flags, log=log, step_ms=2) as stack:
        yield Server(request.param, stack, log, str(echo_model))


async def test_generate_and_stream(server: Server, session: aiohttp.ClientSession) -> None:
    body: dict[str, Any] = {"inputs": WORDS, "parameters": {"max_new_tokens": 5, "details": True}}
    status, answer = await server.post(session, "/generate", body)
    assert (status, answer["generated_text"]) == (200, WORDS)
    assert answer["details"]["finish_reason"] == "length"
    assert all(token["logprob"] <= 0 for token in answer["details"]["tokens"])
    async with session.post(f"{server.url}/generate_stream", json=body) as response:
        pieces = [json.loads(line[5:]) async for line in response.content if line.startswith(b"data:")]
    assert "".join(piece["token"]["text"] for piece in pieces) == WORDS
    assert pieces[-1]["generated_text"] == WORDS


async def test_adapters_and_cached_tokens(server: Server, session: aiohttp.ClientSession) -> None:
    """The stand-in writes the prompt backwards with an adapter, and begins where its cache ends."""
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": WORDS * 20}], "max_tokens": 4}
    for model in ("sql", "tgi", "sql"):
        status, answer = await server.post(session, "/v1/chat/completions", chat | {"model": model})
        assert status == 200, answer
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
    parameters = {"adapter_id": "sql", "max_new_tokens": 4}
    request = await server.arrival(session, "/generate", {"inputs": WORDS, "parameters": parameters})
    assert request["lora"][:2] == ["sql", 1]
    for route, body in (("/generate", {"inputs": "a", "parameters": {"adapter_id": "other"}}), ("/v1/completions", {})):
        assert (await server.post(session, route, {"model": "other", "prompt": "a", **body}))[0] == 404
    async with session.get(f"{server.url}/v1/models") as response:
        assert [each["parent"] for each in (await response.json())["data"]][-2:] == [None, server.model]


async def test_a_request_loads_its_adapter_until_it_is_unloaded(server: Server, session: aiohttp.ClientSession) -> None:
    folder = server.log.parent / "modules-french"
    asked = {"lora_name": "french", "lora_int_id": 9, "lora_path": str(folder)}
    body = {"model": "tgi", "prompt": WORDS, "max_tokens": 4, "lora_request": asked}
    assert (await server.post(session, "/v1/completions", body))[0] == 200  # after a request that tries the adapter
    assert (await server.arrival(session, "/v1/completions", body))["lora"] == ["french", 2, str(folder)]
    assert (await server.post(session, "/v1/completions", body | {"model": "french", "lora_request": None}))[0] == 200
    async with session.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": "french"}) as response:
        assert response.status == 200
    assert (await server.post(session, "/v1/completions", body | {"model": "french", "lora_request": None}))[0] == 404


async def test_a_grammar_constrains_the_text(server: Server, session: aiohttp.ClientSession) -> None:
    grammar = {"type": "regex", "value": "(yes|no), [0-9]{3}"}
    body = {"inputs": WORDS, "parameters": {"max_new_tokens": 20, "grammar": grammar}}
    status, answer = await server.post(session, "/generate", body)
    assert status == 200, answer
    assert answer["generated_text"][:2] in ("ye", "no")
    assert answer["generated_text"][-3:].isdigit()


async def test_tgi_parameters_reach_the_engine(server: Server, session: aiohttp.ClientSession) -> None:
    parameters = {"max_new_tokens": 7, "temperature": 0.5, "top_k": 5, "top_p": 0.875, "top_n_tokens": 3, "stop": ["x"]}
    expected = {"max_tokens": 7, "temperature": 0.5, "top_k": 5, "top_p": 0.875, "logprobs": 3, "end_id": EOS}
    if server.version == "1.3":
        parameters |= {"seed": 42, "repetition_penalty": 1.25, "decoder_input_details": True, "details": True}
        expected |= {"seed": 42, "repetition_penalty": 1.25, "prompt_logprobs": 1}
    request = await server.arrival(session, "/generate", {"inputs": WORDS, "parameters": parameters})
    assert {name: request["sampling"].get(name) for name in expected} == expected


async def test_a_client_that_leaves_has_its_request_aborted(server: Server, session: aiohttp.ClientSession) -> None:
    async def leave_early() -> None:
        body = {"inputs": WORDS, "parameters": {"max_new_tokens": 5000}}
        async with session.post(f"{server.url}/generate_stream", json=body) as response:
            await response.content.readline()

    before = read_log(server.log).ends["cancelled"]
    async with asyncio.timeout(20):
        async with asyncio.TaskGroup() as tasks:
            for _ in range(MAX_BATCH_SIZE):
                tasks.create_task(leave_early())
        while read_log(server.log).unfinished:  # noqa: ASYNC110 - another process writes the file
            await asyncio.sleep(0.02)
    assert read_log(server.log).ends["cancelled"] - before == MAX_BATCH_SIZE


async def test_requests_beyond_the_batch_size_wait_in_the_routers_queue(
    server: Server, session: aiohttp.ClientSession
) -> None:
    async with asyncio.TaskGroup() as tasks:
        streams = Streams(session, tasks)
        await streams.open(server.url, 5 * MAX_BATCH_SIZE, max_new_tokens=30)
        await streams.all_ended()
    assert {(stream.end, stream.tokens) for stream in streams.streams} == {("finished", 30)}
    assert read_log(server.log).unfinished == set()


# ------------------------------------------------------------------------------------------------ shutdown and failures


@pytest.mark.full
def test_an_engine_that_hangs_at_shutdown_is_killed(echo_model: Path) -> None:
    with serving(echo_model, "1.2", "--shutdown-timeout", "1", hang_shutdown=1, workers=1) as stack:
        children = stack.children()
        stack.launcher.send_signal(signal.SIGTERM)
        assert stack.wait() == ExitCode.STOPPED
        assert still_running(children, 5) == []


@pytest.mark.full
async def test_killed_processes_leave_no_workers_behind(echo_model: Path, session: aiohttp.ClientSession) -> None:
    with serving(echo_model, "1.2", "--max-shard-restarts", "1", step_ms=10, workers=1) as stack:
        workers = stack.shard(0).children(recursive=True)
        stack.kill("shard")
        await asyncio.to_thread(stack.wait_for, "shard joined again", "router")
        assert await asyncio.to_thread(still_running, workers, 20) == []
        async with asyncio.TaskGroup() as tasks:
            streams = Streams(session, tasks)
            await streams.open(stack.url, 16, max_new_tokens=3000)
            children = stack.children()
            stack.kill("launcher")
            await streams.all_ended()
        assert {stream.end for stream in streams.streams} <= {"error", "closed"}
        assert await asyncio.to_thread(still_running, children, 20) == []


async def test_streams_survive_the_death_of_a_worker_and_a_stop(
    echo_model: Path, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """Only the shard's watchdog notices the death. The streams continue on the other replica."""
    log = tmp_path / "log"
    with serving(echo_model, "1.3", "--num-replicas", "2", log=log, step_ms=10, workers=1) as stack:
        async with asyncio.TaskGroup() as tasks:
            streams = Streams(session, tasks)
            await streams.open(stack.url, 16, max_new_tokens=200)
            below = stack.shard(0).children(recursive=True)
            next(child for child in below if "mpi4py.futures.server" in child.cmdline()).kill()
            await streams.all_ended()
            await asyncio.to_thread(stack.wait_for, "shard serves again")
            children = stack.children()
            await streams.open(stack.url, 16, max_new_tokens=100)
            stack.launcher.send_signal(signal.SIGTERM)
            await streams.all_ended()
        ends = [(stream.end, stream.tokens) for stream in streams.streams]
        assert ends == [("finished", 200)] * 16 + [("finished", 100)] * 16
        assert await asyncio.to_thread(stack.wait) == ExitCode.STOPPED
        assert await asyncio.to_thread(still_running, children, 5) == []
        assert stack.left_behind() == []
    assert read_log(log).of("shutdown")
