"""Other gateways in front of a mock worker, to be measured beside the router: SMG and vllm-router.

The mock worker streams chats as a model server does: with each step one chunk to every open stream. The gateways are installed
in an environment of their own; one that is missing there is left out.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import orjson
from aiohttp import ClientError, ClientSession, web

MODEL = "default"
"""The worker's model; the router takes this name for its own."""
LAUNCH = {"smg": ["launch"], "vllm-router": []}
"""The gateways, by the names of their commands, and the first arguments of these."""
READY_WITHIN_S = 60.0


@contextmanager
def gateways(folder: Path, step_ms: float) -> Iterator[dict[str, tuple[int, int]]]:
    """Run a mock worker and the gateways that `folder` has; yield the process id and the port of each by its name."""
    with ExitStack() as processes:
        worker = free_port()
        processes.enter_context(_process([sys.executable, "-m", __name__, str(worker), str(step_ms)]))
        asyncio.run(_until_listed(worker))
        running = {}
        for name, launch in LAUNCH.items():
            if not (command := folder / name).exists():
                continue
            port = free_port()
            options = [f"--worker-urls=http://127.0.0.1:{worker}", "--policy=round_robin", "--log-level=error"]
            where = ["--host=127.0.0.1", f"--port={port}", f"--prometheus-port={free_port()}"]
            process = processes.enter_context(_process([str(command), *launch, *options, *where]))
            asyncio.run(_until_listed(port))
            running[name] = (process.pid, port)
        yield running


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _process(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command without its output; kill it at the end: a gateway waits for seconds before it stops."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def _until_listed(port: int) -> None:
    """Return when the server on `port` lists the mock worker's model."""
    async with asyncio.timeout(READY_WITHIN_S), ClientSession() as session:
        while True:
            try:
                async with session.get(f"http://127.0.0.1:{port}/v1/models") as answer:
                    if MODEL in await answer.text():
                        return
            except ClientError:
                pass
            await asyncio.sleep(0.1)


class MockWorker:
    """A server of chats that steps: each step sends one chunk to every open stream."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._step = asyncio.Event()
        """Set when the next step is made."""

    async def serve(self, port: int) -> None:
        """Serve until cancelled."""
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        for path in ("/health", "/get_server_info", "/get_model_info"):
            app.router.add_get(path, self._described)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        while True:
            await asyncio.sleep(self._step_s)
            step, self._step = self._step, asyncio.Event()
            step.set()

    async def _described(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": MODEL, "served_model_name": MODEL})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "mock"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        tokens = (await request.json())["max_tokens"]
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for index in range(tokens):
            await self._step.wait()
            await response.write(_chunk(f"word{index} ", "length" if index == tokens - 1 else None))
        await response.write(b"data: [DONE]\n\n")
        return response


def _chunk(text: str, finish: str | None) -> bytes:
    """Return a chunk of about as many bytes as the router's."""
    choice = {"index": 0, "delta": {"role": "assistant", "content": text}, "logprobs": None, "finish_reason": finish}
    head = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 1700000000, "model": MODEL}
    return b"data: %b\n\n" % orjson.dumps({**head, "choices": [choice], "usage": None})


if __name__ == "__main__":
    asyncio.run(MockWorker(float(sys.argv[2]) / 1e3).serve(int(sys.argv[1])))
