"""The body of one request for every route that generates: for tests of behaviour that all routes share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import orjson

Json = dict[str, Any]

VERBATIM = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""A chat template that writes a conversation of one message as the text alone."""


@dataclass(frozen=True)
class Asking:
    """A route: its body for a text and a number of new tokens, and the type in its errors."""

    path: str
    body: Callable[[str, int], Json]
    error_word: Callable[[Json], str]
    """Return the error type in the JSON of an error."""

    @property
    def is_tgi(self) -> bool:
        return self.error_word is _tgi_word

    @property
    def invalid(self) -> int:
        """The status of an invalid request."""
        return 422 if self.is_tgi else 400

    def streamed(self, text: str, tokens: int) -> Json:
        return {**self.body(text, tokens), "stream": True}


def _tgi(text: str, tokens: int) -> Json:
    return {"inputs": text, "parameters": {"max_new_tokens": tokens, "details": True}}


def _completion(text: str, tokens: int) -> Json:
    return {"prompt": text, "max_tokens": tokens, "ignore_eos": True}


def _chat(text: str, tokens: int) -> Json:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": tokens}


def _response(text: str, tokens: int) -> Json:
    return {"input": text, "max_output_tokens": tokens}


def _infer(text: str, tokens: int) -> Json:
    inputs = [{"name": "a", "shape": [1], "datatype": "BYTES", "data": [text]}]
    return {"inputs": inputs, "parameters": {"max_new_tokens": tokens}}


def _instances(text: str, tokens: int) -> Json:
    return {"instances": [{"inputs": text, "parameters": {"max_new_tokens": tokens}}]}


_tgi_word: Callable[[Json], str] = itemgetter("error_type")


def _openai_word(error: Json) -> str:
    return str(error["error"]["code"])


def _anthropic_word(error: Json) -> str:
    return str(error["error"]["type"])


GENERATE = Asking("/generate", _tgi, _tgi_word)
CHAT = Asking("/v1/chat/completions", _chat, _openai_word)
COMPLETIONS = Asking("/v1/completions", _completion, _openai_word)
RESPONSES = Asking("/v1/responses", _response, _openai_word)
MESSAGES = Asking("/v1/messages", _chat, _anthropic_word)

WHOLE = (
    GENERATE,
    Asking("/", _tgi, _tgi_word),
    CHAT,
    COMPLETIONS,
    RESPONSES,
    MESSAGES,
    Asking("/invocations", _tgi, _tgi_word),
    Asking("/invocations", _chat, _openai_word),
    Asking("/vertex", _instances, _tgi_word),
    Asking("/v2/models/m/versions/1/infer", _infer, _tgi_word),
)
"""Every route that returns a complete response."""

STREAMED = (
    Asking("/generate_stream", _tgi, _tgi_word),
    Asking("/", _tgi, _tgi_word),
    CHAT,
    COMPLETIONS,
    RESPONSES,
    MESSAGES,
)
"""Every route that streams."""


def name(asking: Asking) -> str:
    """Return the id for parametrized tests."""
    return asking.path + "-" + next(iter(asking.body("", 1)))


def stream_data(stream: bytes) -> list[Json]:
    """Return the JSON data of each event that has data."""
    lines = (line for line in stream.split(b"\n") if line.startswith(b"data: {"))
    return [orjson.loads(line.removeprefix(b"data: ")) for line in lines]
