"""What a Responses stream says, to the byte:

    response.created, response.in_progress
    a text        output_item.added, content_part.added, output_text.delta …, output_text.done, content_part.done, output_item.done
    a reasoning   the same with reasoning_text.delta … and reasoning_text.done
    a call        output_item.added, function_call_arguments.delta …, function_call_arguments.done, output_item.done
    response.completed, or response.incomplete where the length ended it, or response.failed

Each is told by its name too and has the next `sequence_number`. No [DONE] follows.
"""

from __future__ import annotations

import secrets
from typing import Any

import orjson

from text_generation_router.api.core.blocks import CachedTokens, Kind, Script
from text_generation_router.api.core.chat import AnswerEnd, Finish
from text_generation_router.api.core.ids import Named, new_call_id, now
from text_generation_router.api.openai.responses_schemas import ResponsesBody
from text_generation_router.api.openai.responses_tools import as_sent, callable_tools
from text_generation_router.errors import InvalidRequest, ServingError

Json = dict[str, Any]

_PREFIXES = {Kind.TEXT: "msg_", Kind.REASONING: "rs_", Kind.CALL: "fc_"}
_DELTAS = {
    Kind.TEXT: "response.output_text.delta",
    Kind.REASONING: "response.reasoning_text.delta",
    Kind.CALL: "response.function_call_arguments.delta",
}


class ResponseScript(Script):
    """Writes a response down."""

    def __init__(self, body: ResponsesBody, named: Named, prompt_tokens: int, cached_tokens: CachedTokens) -> None:
        """Raises InvalidRequest for what cannot be repeated in the answer."""
        super().__init__()
        self._response = _new_response(body, named)
        self._cached_tokens = cached_tokens
        self._places = callable_tools(body.tools or ()).places
        self._prompt_tokens = prompt_tokens
        self._sequence = 0
        self._item: Json = {}
        """The open item, as it began."""
        self._delta_head = b""
        """A delta of the open item, up to its number."""

    def whole(self) -> Json:
        return self._response

    def begin(self) -> bytes:
        return self._say("response.created", response=self._response) + self._say(
            "response.in_progress", response=self._response
        )

    def block_began(self, kind: Kind, name: str) -> bytes:
        item: Json = {"id": _PREFIXES[kind] + secrets.token_hex(12)}
        if kind is Kind.TEXT:
            item |= {"type": "message", "status": "in_progress", "role": "assistant", "content": []}
        elif kind is Kind.REASONING:
            item |= {"type": "reasoning", "status": "in_progress", "summary": [], "content": []}
        else:
            namespace, own = self._places.get(name, (None, name))
            item |= {
                "type": "function_call",
                "status": "in_progress",
                "call_id": new_call_id(),
                "name": own,
                "arguments": "",
            }
            if namespace is not None:
                item["namespace"] = namespace
        self._item = item
        delta = {"type": _DELTAS[kind], **self._place(kind)} | ({"logprobs": []} if kind is Kind.TEXT else {})
        self._delta_head = b'event: %b\ndata: %b,"sequence_number":' % (
            _DELTAS[kind].encode(),
            orjson.dumps(delta)[:-1],
        )
        began = self._say("response.output_item.added", output_index=len(self.blocks), item=item)
        if kind is Kind.CALL:
            return began
        return began + self._say("response.content_part.added", **self._place(kind), part=_part(kind, ""))

    def text_delta(self, delta: str) -> bytes:
        # Formatted by hand, and only the text is escaped.
        sequence, self._sequence = self._sequence, self._sequence + 1
        return b'%b%d,"delta":%b}\n\n' % (self._delta_head, sequence, orjson.dumps(delta))

    reasoning_delta = text_delta
    arguments_delta = text_delta

    def block_ended(self, kind: Kind, text: str, *, whole: bool) -> tuple[Json, bytes]:
        item = self._item | {"status": "completed" if whole else "incomplete"}
        place = self._place(kind)
        if kind is Kind.CALL:
            item["arguments"] = text
            told = self._say("response.function_call_arguments.done", **place, name=item["name"], arguments=text)
        else:
            part = _part(kind, text)
            item["content"] = [part]
            if kind is Kind.TEXT:
                told = self._say("response.output_text.done", **place, text=text, logprobs=[])
            else:
                told = self._say("response.reasoning_text.done", **place, text=text)
            told += self._say("response.content_part.done", **place, part=part)
        return item, told + self._say("response.output_item.done", output_index=len(self.blocks), item=item)

    def ended(self, end: AnswerEnd) -> bytes:
        status = "completed"
        if end.finish is Finish.LENGTH:
            status = "incomplete"
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self._response["completed_at"] = now()
        self._response |= {
            "status": status,
            "output": self.blocks,
            "usage": usage(self._prompt_tokens, end.ending.generated_tokens, self._cached_tokens()),
        }
        return self._say(f"response.{status}", response=self._response)

    def failure(self, error: ServingError) -> bytes:
        last = self.cut_off()
        self._response |= {
            "status": "failed",
            "error": {"code": error.responses_code, "message": str(error)},
            "output": self.blocks,
        }
        return last + self._say("response.failed", response=self._response)

    def _place(self, kind: Kind) -> Json:
        place = {"item_id": self._item["id"], "output_index": len(self.blocks)}
        return place if kind is Kind.CALL else place | {"content_index": 0}

    def _say(self, name: str, /, **fields: object) -> bytes:
        sequence, self._sequence = self._sequence, self._sequence + 1
        event = orjson.dumps({"type": name, "sequence_number": sequence, **fields})
        return b"event: %b\ndata: %b\n\n" % (name.encode(), event)


def usage(prompt_tokens: int, generated_tokens: int, cached_tokens: int) -> Json:
    """The counts; what is not counted apart is 0."""
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
        "output_tokens": generated_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + generated_tokens,
    }


def _part(kind: Kind, text: str) -> Json:
    if kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _new_response(body: ResponsesBody, named: Named) -> Json:
    """A response that has only begun: what was asked for, with the defaults that were taken. Raises InvalidRequest."""
    choice = body.tool_choice
    reasoning = body.reasoning
    return {
        "id": named.id,
        "object": "response",
        "created_at": named.created,
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": named.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "service_tier": body.service_tier if body.service_tier in ("priority", "flex") else "default",
        "store": False,
        "temperature": _number(body.temperature),
        "text": _repeated(
            "text", {"format": (body.text.format if body.text is not None else None) or {"type": "text"}}
        ),
        "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump(),
        "tools": _repeated("tools", [as_sent(tool) for tool in body.tools or ()]),
        "top_logprobs": 0,
        "top_p": _number(body.top_p),
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def _repeated(name: str, value: object) -> orjson.Fragment:
    """What the client wrote, written once. Raises InvalidRequest: what can be read may be too deep to be written."""
    try:
        return orjson.Fragment(orjson.dumps(value))
    except orjson.JSONEncodeError:
        raise InvalidRequest(f"`{name}` is nested too deeply") from None


def _number(value: float | None) -> float:
    """What the client wrote: a float32 has seven digits."""
    return 1.0 if value is None else float(f"{value:.7g}")
