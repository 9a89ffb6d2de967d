"""The dialects of a server: bodies of requests, and the events of a streamed answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

Prompt = str | list[int]
PATHS = {
    "tgi": "/generate_stream",
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "anthropic": "/v1/messages",
}
DELTAS = frozenset(
    f"response.{kind}.delta"
    for kind in ("output_text", "reasoning_text", "reasoning_summary_text", "function_call_arguments", "refusal")
)
"""Events of Responses that hold generated text."""
BLOCK_DELTAS = ("text", "thinking", "partial_json")
"""Fields of a delta of Messages that hold generated text."""
VISIBLE = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")
"""Fields of a chat delta that hold generated text."""


@dataclass(frozen=True)
class BodyMaker:
    """Makes bodies of requests in one dialect."""

    dialect: str
    model: str
    sampling: dict[str, Any]
    extra: dict[str, Any]
    """Fields to add; None removes one."""

    def body(self, system: Prompt, turns: Sequence[tuple[Prompt, str]], new_tokens: int, session: str = "") -> bytes:
        """Return the body for the last of some turns of a session; the turns before it have their answers."""
        if self.dialect == "tgi":
            parameters = {"max_new_tokens": new_tokens, "details": True} | self.sampling
            return self._bytes({"inputs": _joined(system, turns), "parameters": parameters})
        fields: dict[str, Any] = {"model": self.model}
        if session:
            fields |= (
                {"metadata": {"user_id": session}} if self.dialect == "anthropic" else {"prompt_cache_key": session}
            )
        if self.dialect in ("responses", "anthropic"):
            names = ("input", "instructions") if self.dialect == "responses" else ("messages", "system")
            length = "max_output_tokens" if self.dialect == "responses" else "max_tokens"
            fields |= {names[0]: _messages("", turns), length: new_tokens, "temperature": 0, "stream": True}
            return self._bytes(fields | ({names[1]: system} if system else {}) | self.sampling)
        if self.dialect == "openai":
            fields["prompt"] = _joined(system, turns)
        else:
            fields["messages"] = _messages(system, turns)
        fields |= {"max_tokens": new_tokens, "temperature": 0, "stream": True, "ignore_eos": True}
        fields["stream_options"] = {"include_usage": True}
        return self._bytes(fields | self.sampling)

    def _bytes(self, fields: dict[str, Any]) -> bytes:
        fields = fields | self.extra
        return orjson.dumps({name: value for name, value in fields.items() if value is not None})


def _joined(system: Prompt, turns: Sequence[tuple[Prompt, str]]) -> Prompt:
    """Return a chat as one prompt; token ids only if all its parts are."""
    (last, _), before = turns[-1], turns[:-1]
    if isinstance(last, list):
        assert not before
        return [*system, *last] if isinstance(system, list) else last
    parts = [system, *(part for prompt, answer in before for part in (prompt, answer)), last]
    return " ".join(str(part) for part in parts if part)


def _messages(system: Prompt, turns: Sequence[tuple[Prompt, str]]) -> list[dict[str, object]]:
    messages: list[dict[str, object]] = [{"role": "system", "content": system}] if system else []
    for prompt, answer in turns[:-1]:
        messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return [*messages, {"role": "user", "content": turns[-1][0]}]


class AnswerStream:
    """The events of one answer, with the times of those that hold tokens."""

    __slots__ = (
        "_kind",
        "_read",
        "_rest",
        "_texts",
        "_wants_text",
        "cached_tokens",
        "error",
        "has_ended",
        "prompt_tokens",
        "times",
        "usage_tokens",
    )

    def __init__(self, dialect: str, *, wants_text: bool) -> None:
        self._kind = dialect
        readers = {"tgi": self._tgi, "responses": self._responses, "anthropic": self._anthropic}
        self._read = readers.get(dialect, self._openai)
        self._wants_text = wants_text
        self._texts: list[str] = []
        self._rest = b""
        self.times: list[float] = []
        """Arrival of each event with tokens."""
        self.usage_tokens: int | None = None
        """New tokens, as the server counted them."""
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.error = ""
        self.has_ended = False
        """The server said that the answer is complete."""

    @property
    def tokens(self) -> int:
        """New tokens: the server's count, else one an event."""
        return len(self.times) if self.usage_tokens is None else self.usage_tokens

    @property
    def text(self) -> str:
        """The answer, if it was wanted."""
        return "".join(self._texts)

    def feed(self, stamp: float, data: bytes) -> None:
        """Read a part of the body that arrived at `stamp`."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        lines = data.split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._event(stamp, line[5:])

    def _event(self, stamp: float, text: bytes) -> None:
        try:
            event = orjson.loads(text)
        except ValueError:
            if text.strip() == b"[DONE]":
                self.has_ended = True
            else:
                self.error = self.error or f"no JSON in an event: {text.strip()[:100].decode(errors='replace')}"
            return
        if not isinstance(event, dict):
            self.error = self.error or "an event is no JSON object"
        elif event.get("error"):
            self.error = self.error or message_of(event, text)
        else:
            try:
                self._read(stamp, event)
            except (AttributeError, TypeError):
                self.error = self.error or f"an event has another form: {text.strip()[:100].decode(errors='replace')}"

    def _tgi(self, stamp: float, event: dict[str, Any]) -> None:
        token = event.get("token")
        if token:
            self.times.append(stamp)
            if self._wants_text and not token.get("special"):
                self._texts.append(token.get("text") or "")
        if event.get("generated_text") is not None:
            self.has_ended = True
            if details := event.get("details"):
                self.usage_tokens = details.get("generated_tokens")
                self.prompt_tokens = details.get("input_length")

    def _openai(self, stamp: float, event: dict[str, Any]) -> None:
        if usage := event.get("usage"):
            self.usage_tokens = usage.get("completion_tokens")
            self.prompt_tokens = usage.get("prompt_tokens")
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        for choice in event.get("choices") or ():
            finished = choice.get("finish_reason") is not None
            self.has_ended |= finished
            if self._kind == "openai":
                # Half a character has no text yet; an event without text at the end is no token.
                text, is_token = choice.get("text") or "", bool(choice.get("text")) or not finished
            else:
                delta = choice.get("delta") or {}
                text, is_token = delta.get("content") or "", any(delta.get(name) for name in VISIBLE)
            if is_token:
                self.times.append(stamp)
                if self._wants_text:
                    self._texts.append(text)

    def _responses(self, stamp: float, event: dict[str, Any]) -> None:
        kind = event.get("type")
        if kind in DELTAS:
            self.times.append(stamp)
            if self._wants_text and kind == "response.output_text.delta":
                self._texts.append(event["delta"])
        elif kind in ("response.failed", "error"):
            self.error = self.error or message_of(event.get("response", event), b"the response failed")
        elif kind in ("response.completed", "response.incomplete"):
            self.has_ended = True
            usage = event["response"].get("usage") or {}
            self.usage_tokens, self.prompt_tokens = usage.get("output_tokens"), usage.get("input_tokens")
            self.cached_tokens = (usage.get("input_tokens_details") or {}).get("cached_tokens")

    def _anthropic(self, stamp: float, event: dict[str, Any]) -> None:
        delta = event.get("delta") or {}
        if any(delta.get(name) for name in BLOCK_DELTAS):
            self.times.append(stamp)
            if self._wants_text:
                self._texts.append(delta.get("text") or "")
        usage = event.get("usage") or (event.get("message") or {}).get("usage") or {}
        if "input_tokens" in usage:
            self.cached_tokens = usage.get("cache_read_input_tokens") or 0
            self.prompt_tokens = usage["input_tokens"] + self.cached_tokens
            self.prompt_tokens += usage.get("cache_creation_input_tokens") or 0
        self.usage_tokens = usage.get("output_tokens", self.usage_tokens)
        self.has_ended |= event.get("type") == "message_stop"


def message_of(body: object, text: bytes) -> str:
    """Return the message of an error in any of the dialects."""
    if isinstance(body, dict):
        error = body.get("error", body)
        if isinstance(error, dict):
            error = error.get("message") or error.get("detail")
        if isinstance(error, str) and error:
            return error
        if isinstance(body.get("message"), str):
            return str(body["message"])
        if isinstance(body.get("detail"), str):
            return str(body["detail"])
    return text[:200].decode(errors="replace").strip()


def refusal(status: int, body: bytes) -> str:
    """Return the text of a response that is no stream."""
    try:
        message = message_of(orjson.loads(body), body)
    except ValueError:
        message = message_of(None, body)
    return f"{status}: {message}" if message else f"{status}"
