"""Requests in three dialects, streamed and whole, and their answers without what differs from run to run."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "London"]}, "year": {"type": "integer", "minimum": 0, "maximum": 9999}},
    "required": ["city", "year"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class MixedRequest:
    """A request."""

    path: str
    body: dict[str, Any]

    @property
    def streamed(self) -> bool:
        return self.path == "/generate_stream" or bool(self.body.get("stream"))


@dataclass
class ReadAnswer:
    """The answer to a request."""

    status: int = 0
    texts: dict[str, str] = field(default_factory=dict)
    """Texts by their place in the answer: choice, kind of block."""
    ends: list[str] = field(default_factory=list)
    """Each end of a choice; an error is one, too."""
    tokens: int = 0
    """Tokens that the answer lists or events that it had."""
    prefill: int = 0
    """Prompt tokens with log-probabilities."""
    longest_gap: float = field(default=0.0, compare=False)
    """Seconds between two events, at most."""

    def add(self, place: object, text: str | None) -> None:
        self.texts[str(place)] = self.texts.get(str(place), "") + (text or "")


def mix(number: int, tokens: int) -> MixedRequest:
    """Return the request of a number: twelve kinds in turn, each with its own prompt."""
    text = f"{number} one two three four five six seven"
    sampled = {"do_sample": True, "seed": number, "temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1}
    chat = {"model": "tgi", "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0.0}
    drawn = {"seed": number, "temperature": 0.8, "frequency_penalty": 0.3}
    schema = {"response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}}
    regex = {"grammar": {"type": "regex", "value": f"({number}[a-f]{{3}} ){{2,60}}"}}

    def tgi(path: str, **parameters: object) -> MixedRequest:
        return MixedRequest(path, {"inputs": text, "parameters": {"max_new_tokens": tokens, **parameters}})

    kinds = (
        tgi("/generate_stream", top_n_tokens=2),
        tgi("/generate_stream", **sampled),
        tgi("/generate_stream", **regex),
        tgi("/generate_stream", stop=["four five six seven8", "zebra"]),
        tgi("/generate", details=True, decoder_input_details=True),
        tgi("/generate", details=True, best_of=2, do_sample=True, top_k=1),
        MixedRequest("/v1/chat/completions", {**chat, **drawn, "stream": True}),
        MixedRequest("/v1/chat/completions", {**chat, **schema, "stream": True}),
        MixedRequest("/v1/chat/completions", {**chat, "logprobs": True}),
        MixedRequest("/v1/completions", {"prompt": text, "max_tokens": tokens, "n": 2, **drawn, "stream": True}),
        MixedRequest("/v1/messages", {**chat, "stream": True, "stop_sequences": ["zebra"]}),
        MixedRequest("/v1/messages", chat),
    )
    return kinds[number % len(kinds)]


async def ask(client: aiohttp.ClientSession, asked: MixedRequest, answer: ReadAnswer, **headers: str) -> None:
    """Send a request and read its answer."""
    try:
        async with client.post(asked.path, json=asked.body, headers=headers) as response:
            answer.status = response.status
            if not asked.streamed or response.status != 200:
                _read_whole(answer, await response.json())
                return
            last = time.monotonic()
            async for line in response.content:
                if line.startswith(b"data:"):
                    now = time.monotonic()
                    answer.longest_gap, last = max(answer.longest_gap, now - last), now
                    if (data := line.removeprefix(b"data:").strip()) != b"[DONE]":
                        _read_event(answer, json.loads(data))
    except (aiohttp.ClientError, TimeoutError) as error:
        answer.ends.append(type(error).__name__)


def _read_event(answer: ReadAnswer, event: dict[str, Any]) -> None:
    if "error" in event:
        answer.ends.append(f"error: {event['error']}")
    elif "token" in event:
        answer.tokens += 1
        answer.add("token", event["token"]["text"])
        if event["generated_text"] is not None:
            answer.add("whole", event["generated_text"])
            answer.ends.append("finished")
    elif "choices" in event:
        for choice in event["choices"]:
            answer.tokens += 1
            answer.add(choice["index"], choice["text"] if "text" in choice else choice["delta"].get("content"))
            if choice["finish_reason"]:
                answer.ends.append(f"{choice['index']}: {choice['finish_reason']}")
    elif event["type"] == "content_block_delta":
        answer.tokens += 1
        answer.add(event["index"], event["delta"].get("text"))
    elif event["type"] == "message_delta":
        answer.ends.append(event["delta"]["stop_reason"])
    # The choices of one request end in any order.
    answer.ends.sort()


def _read_whole(answer: ReadAnswer, body: dict[str, Any]) -> None:
    if "generated_text" in body:
        details = body["details"]
        for place, each in enumerate(
            [{**details, "generated_text": body["generated_text"]}, *(details.get("best_of_sequences") or ())]
        ):
            answer.add(place, each["generated_text"])
            answer.ends.append(each["finish_reason"])
            answer.tokens += len(each["tokens"])
            answer.prefill += len(each["prefill"])
    elif "choices" in body:
        for choice in body["choices"]:
            answer.add(choice["index"], choice["message"]["content"])
            answer.ends.append(choice["finish_reason"])
            answer.tokens += len(choice["logprobs"]["content"])
    elif "content" in body:
        for place, block in enumerate(body["content"]):
            answer.add(place, block["text"])
        answer.ends.append(body["stop_reason"])
    else:
        answer.ends.append(f"error: {body}")
