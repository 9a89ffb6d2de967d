"""A plain server of the dialects that text-generation-benchmark speaks: tokens at a set pace, no model.

python tests/support/openai_mock.py --port 8000 --ttft-ms 50 --itl-ms 10
"""

from __future__ import annotations

import argparse
import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class OpenAIMock:
    """The settings of the server, and the requests it has got."""

    ttft_s: float = 0.0
    itl_s: float = 0.0
    tokens_per_event: int = 1
    api_key: str = ""
    refuse: int = 0
    """Every request with a number divisible by this is refused; 0: none."""
    counts_tokens: bool = True
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)

    def app(self) -> web.Application:
        """Return the server's application."""
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        for path in ("/v1/completions", "/v1/chat/completions", "/generate_stream"):
            app.router.add_post(path, self._stream)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "mock-model", "object": "model"}]})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        self.arrivals.append(time.perf_counter())
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": {"message": "Incorrect API key"}}, status=401)
        if self.refuse and len(self.bodies) % self.refuse == 0:
            return web.json_response({"error": "Model is overloaded", "error_type": "overloaded"}, status=429)
        tokens = body["parameters"]["max_new_tokens"] if "parameters" in body else body["max_tokens"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        due = asyncio.get_running_loop().time() + self.ttft_s
        for start in range(0, tokens, self.tokens_per_event):
            await asyncio.sleep(due - asyncio.get_running_loop().time())
            due += self.itl_s
            count = min(self.tokens_per_event, tokens - start)
            await response.write(self._event(request.path, count, tokens, is_last=start + count == tokens))
        if request.path != "/generate_stream":
            if self.counts_tokens:
                usage = {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": tokens + 7}
                await response.write(_data({"id": "1", "choices": [], "usage": usage}))
            await response.write(b"data: [DONE]\n\n")
        return response

    def _event(self, path: str, count: int, tokens: int, *, is_last: bool) -> bytes:
        text, reason = " word" * count, "length" if is_last else None
        if path == "/generate_stream":
            event: dict[str, Any] = {"index": 1, "token": {"id": 5, "text": text, "logprob": -1.0, "special": False}}
            details = {"finish_reason": "length", "generated_tokens": tokens, "input_length": 7}
            return _data(
                event | {"generated_text": text if is_last else None, "details": None if not is_last else details}
            )
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        choice |= {"delta": {"role": "assistant", "content": text}} if "chat" in path else {"text": text}
        return _data({"id": "1", "object": "chunk", "model": "mock-model", "choices": [choice]})


def _data(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


@asynccontextmanager
async def serve_mock(mock: OpenAIMock, tls: ssl.SSLContext | None = None) -> AsyncIterator[OpenAIMock]:
    """Serve on a free port of 127.0.0.1, or on that of the mock."""
    runner = web.AppRunner(mock.app(), shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", mock.port, ssl_context=tls)
    await site.start()
    mock.port = runner.addresses[0][1]
    try:
        yield mock
    finally:
        await runner.cleanup()


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ttft-ms", type=float, default=0.0)
    parser.add_argument("--itl-ms", type=float, default=0.0)
    options = parser.parse_args()
    mock = OpenAIMock(options.ttft_ms / 1e3, options.itl_ms / 1e3, port=options.port)
    web.run_app(mock.app(), host="127.0.0.1", port=mock.port, print=None)


if __name__ == "__main__":
    main()
