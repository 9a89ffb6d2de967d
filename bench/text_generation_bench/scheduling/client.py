"""A client of /v1/completions and /generate_stream that records the time of each token."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

TENANT_HEADER = "x-llm-d-inference-fairness-id"


@dataclass(slots=True)
class Completion:
    """One request as seen by its client. Times are those of time.monotonic()."""

    prompt_tokens: int
    sent: float
    status: int = 0
    times: list[float] = field(default_factory=list)
    """Arrival of each token."""
    tokens: list[str] = field(default_factory=list)
    """Text of each token."""
    ids: list[int] = field(default_factory=list)
    """Token ids; only from /generate_stream."""
    text: str = ""
    generated: int = 0
    cached: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    error: str = ""
    ended: float = 0.0

    @property
    def first(self) -> float:
        """Time to first token, in seconds."""
        return self.times[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Times between tokens, in seconds."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


def client() -> aiohttp.ClientSession:
    """Return a session without limits on connections and time."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))


async def complete(
    session: aiohttp.ClientSession,
    url: str,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    tenant: str | None = None,
    served: Callable[[int], None] | None = None,
) -> Completion:
    """Stream a greedy completion of token ids to its full length; `served` is called with the number of tokens computed."""
    body = {
        "model": "tgi",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": 0,  # one chunk per token, even for half a character
    }
    answer = Completion(len(prompt), time.monotonic())
    headers = {TENANT_HEADER: tenant} if tenant else {}
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as reply:
        await _head(reply, answer)
        async for event in _events(reply):
            if "error" in event:
                answer.error = json.dumps(event)
            elif event["choices"]:
                answer.times.append(time.monotonic())
                answer.tokens += event["choices"][0]["logprobs"]["tokens"]
                answer.text += event["choices"][0]["text"]
                if served is not None:
                    served(len(prompt) if len(answer.times) == 1 else 0)
                    served(1)
            elif usage := event.get("usage"):
                answer.generated = usage["completion_tokens"]
                answer.cached = usage["prompt_tokens_details"]["cached_tokens"]
    answer.ended = time.monotonic()
    if answer.status == 200 and not answer.error and answer.generated != max_tokens:
        answer.error = f"{answer.generated} tokens instead of {max_tokens}"
    return answer


async def complete_whole(
    session: aiohttp.ClientSession, url: str, prompt: Sequence[int], max_tokens: int
) -> Completion:
    """Request a completion without streaming; its headers contain the latency breakdown."""
    body = {"model": "tgi", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = Completion(len(prompt), time.monotonic())
    async with session.post(f"{url}/v1/completions", json=body) as reply:
        await _head(reply, answer)
        answer.ended = time.monotonic()
        if answer.status == 200:
            answer.generated = (await reply.json())["usage"]["completion_tokens"]
            answer.ended = time.monotonic()
    return answer


async def generate(
    session: aiohttp.ClientSession,
    url: str,
    text: str,
    parameters: dict[str, Any],
    token: Callable[[float], None] | None = None,
) -> Completion:
    """Stream a text from /generate_stream, whose events have token ids; `token` is called with the time of each."""
    answer = Completion(0, time.monotonic())
    async with session.post(f"{url}/generate_stream", json={"inputs": text, "parameters": parameters}) as reply:
        await _head(reply, answer)
        async for event in _events(reply):
            if "error" in event:
                answer.error = json.dumps(event)
                continue
            answer.times.append(time.monotonic())
            answer.ids.append(event["token"]["id"])
            if token is not None:
                token(answer.times[-1])
            if event.get("generated_text") is not None:
                answer.text = event["generated_text"]
                answer.generated = len(answer.ids)
    answer.ended = time.monotonic()
    if not answer.error and not answer.generated:
        answer.error = f"the stream ended after {len(answer.ids)} tokens"
    return answer


async def _head(reply: aiohttp.ClientResponse, answer: Completion) -> None:
    answer.status = reply.status
    answer.headers = {name.lower(): value for name, value in reply.headers.items()}
    if reply.status != 200:
        answer.error = await reply.text()


async def _events(reply: aiohttp.ClientResponse) -> Any:  # noqa: ANN401 - JSON
    if reply.status != 200:
        return
    async for line in reply.content:
        if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
            yield json.loads(line[5:])


async def metrics(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Return the metrics without labels, by name."""
    async with session.get(f"{url}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    pairs = (line.split() for line in lines if line and line[0] != "#" and "{" not in line)
    return {name: float(value) for name, value, *_ in pairs}


def verdict(*, holds: bool) -> str:
    """Return the last column of a measurement with a target."""
    return "ok" if holds else "MISSED"
