"""Writer of responses in OpenAI's Responses API, complete or streamed:

    response.created, response.in_progress
    text          output_item.added, content_part.added, output_text.delta …, output_text.done, content_part.done, output_item.done
    reasoning     the same with reasoning_text.delta … and reasoning_text.done
    call          output_item.added, function_call_arguments.delta …, function_call_arguments.done, output_item.done
    response.completed, response.incomplete (ended by length) or response.failed

Every event carries its name and the next `sequence_number`. No [DONE] follows.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Any, Literal, NotRequired

import orjson
from pydantic import ConfigDict, with_config

from text_generation_router.api.core.chat import AnswerEnd, Finish
from text_generation_router.api.core.ids import Named, new_call_id, now
from text_generation_router.api.core.one_answer import CachedTokens, ReplyWriter
from text_generation_router.api.http.fields import WrittenJson
from text_generation_router.api.openai.answers import ContentLogprob, ReasoningDetails, WrittenLogprobs, tokens_of
from text_generation_router.api.openai.responses_input import as_sent, callable_tools
from text_generation_router.api.openai.responses_schemas import ItemStatus, ResponsesBody, ResponseStatus
from text_generation_router.chat.events import Kind
from text_generation_router.errors import ServingError
from text_generation_router.generation import TokenOutput
from text_generation_router.web.bodies import ResponseBody


class OutputText(ResponseBody):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    """Always empty."""
    logprobs: WrittenLogprobs
    """Empty unless they were asked for."""


class ReasoningText(ResponseBody):
    """A text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class MessageItem(ResponseBody):
    """A message of the model."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(ResponseBody):
    """Reasoning of the model, with --split-reasoning."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any]
    """Always empty."""
    content: list[ReasoningText]


class CallItem(ResponseBody):
    """A function call."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: NotRequired[str]


OutputItem = MessageItem | ReasoningItem | CallItem


class InputTokensDetails(ResponseBody):
    """Details of the prompt tokens."""

    cached_tokens: int
    """Tokens found in the prefix cache."""
    cache_write_tokens: int


class ResponseUsage(ResponseBody):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: ReasoningDetails
    total_tokens: int


class FailedResponse(ResponseBody):
    """The error of a failed response."""

    code: str
    message: str


class IncompleteDetails(ResponseBody):
    """The reason of an incomplete response."""

    reason: Literal["max_output_tokens"]


class ReasoningSettings(ResponseBody):
    """The requested reasoning."""

    effort: str | None
    summary: None


class ResponseAnswer(ResponseBody):
    """A response, with the settings that produced it."""

    id: str
    object: Literal["response"]
    created_at: float
    status: ResponseStatus
    background: Literal[False]
    completed_at: int | None
    error: FailedResponse | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: ReasoningSettings
    service_tier: str
    store: Literal[False]
    temperature: float
    text: WrittenJson
    tool_choice: str | dict[str, Any]
    tools: WrittenJson
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None


@with_config(ConfigDict(extra="allow", use_attribute_docstrings=True))
class ResponseEvent(ResponseBody):
    """A named event of a streamed response; the last is response.completed, .incomplete or .failed."""

    type: str
    sequence_number: int


Logprobs = Callable[[Sequence[TokenOutput]], list[ContentLogprob]]

_PREFIXES = {Kind.TEXT: "msg_", Kind.REASONING: "rs_", Kind.ARGUMENTS: "fc_"}
_DELTAS = {
    Kind.TEXT: "response.output_text.delta",
    Kind.REASONING: "response.reasoning_text.delta",
    Kind.ARGUMENTS: "response.function_call_arguments.delta",
}


class ResponseWriter(ReplyWriter[OutputItem]):
    def __init__(
        self,
        body: ResponsesBody,
        named: Named,
        prompt_tokens: int,
        cached_tokens: CachedTokens,
        logprobs: Logprobs | None = None,
    ) -> None:
        """`logprobs`: gives the log-probabilities of tokens; None: the response has none."""
        super().__init__()
        self.scored = logprobs is not None
        self._logprobs_of = logprobs
        self._unwritten: list[TokenOutput] = []
        """Tokens since the last delta of the text: a parser may hold their text back."""
        self._logprobs: list[bytes] = []
        """Log-probabilities of the open text, as JSON: the end of a block repeats them four times."""
        self._begins = False
        """True until the first delta of a text."""
        self._response = _new_response(body, named)
        self._cached_tokens = cached_tokens
        self._origins = callable_tools(body.tools or ()).origins
        self._prompt_tokens = prompt_tokens
        self._sequence = 0
        self._item: OutputItem
        """The open item."""
        self._place: dict[str, Any]
        """The place of its content in the response."""
        self._delta_head = b""
        """A delta of the open item, up to its number."""

    def whole(self) -> ResponseAnswer:
        return self._response

    def begin(self) -> bytes:
        return self._named("response.created", response=self._response) + self._named(
            "response.in_progress", response=self._response
        )

    def block_began(self, kind: Kind, name: str) -> bytes:
        self._item = item = self._new_item(kind, name)
        self._place = {"item_id": item["id"], "output_index": len(self.blocks)}
        if kind is not Kind.ARGUMENTS:
            self._place["content_index"] = 0
        self._begins = True
        delta = {"type": _DELTAS[kind], **self._place} | ({"logprobs": []} if kind is Kind.TEXT else {})
        self._delta_head = b'event: %b\ndata: %b,"sequence_number":' % (
            _DELTAS[kind].encode(),
            orjson.dumps(delta)[:-1],
        )
        began = self._named("response.output_item.added", output_index=len(self.blocks), item=item)
        if kind is Kind.ARGUMENTS:
            return began
        return began + self._named(
            "response.content_part.added",
            **self._place,
            part=_output_text("", orjson.Fragment(b"[]")) if kind is Kind.TEXT else _reasoning_text(""),
        )

    def score(self, output: TokenOutput) -> None:
        self._unwritten.append(output)

    def delta(self, delta: str) -> bytes:
        if self._logprobs_of is not None:
            outputs, self._unwritten = self._unwritten, []
            if self._item["type"] == "message":
                return self._scored_delta(delta, self._logprobs_of, outputs)
        # Formatted by hand; only the text is escaped.
        sequence, self._sequence = self._sequence, self._sequence + 1
        return b'%b%d,"delta":%b}\n\n' % (self._delta_head, sequence, orjson.dumps(delta))

    def _scored_delta(self, delta: str, logprobs_of: Logprobs, outputs: list[TokenOutput]) -> bytes:
        if self._begins:  # other tokens before it are markers
            outputs, self._begins = tokens_of(delta, outputs), False
        written = orjson.dumps(logprobs_of(outputs))
        self._logprobs.append(written[1:-1])
        return self._named(_DELTAS[Kind.TEXT], **self._place, delta=delta, logprobs=orjson.Fragment(written))

    def block_ended(self, text: str, *, whole: bool) -> tuple[OutputItem, bytes]:
        item, place = self._item, self._place
        item["status"] = "completed" if whole else "incomplete"
        match item["type"]:
            case "function_call":
                item["arguments"] = text
                name = "response.function_call_arguments.done"
                events = self._named(name, **place, name=item["name"], arguments=text)
            case "message":
                logprobs, self._logprobs = orjson.Fragment(b"[%b]" % b",".join(filter(None, self._logprobs))), []
                item["content"] = [_output_text(text, logprobs)]
                events = self._named("response.output_text.done", **place, text=text, logprobs=logprobs)
                events += self._named("response.content_part.done", **place, part=_output_text(text, logprobs))
            case "reasoning":
                item["content"] = [_reasoning_text(text)]
                events = self._named("response.reasoning_text.done", **place, text=text)
                events += self._named("response.content_part.done", **place, part=_reasoning_text(text))
        return item, events + self._named("response.output_item.done", output_index=len(self.blocks), item=item)

    def ended(self, end: AnswerEnd) -> bytes:
        response = self._response
        response["status"] = "completed"
        if end.finish is Finish.LENGTH:
            response["status"] = "incomplete"
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = now()
        response["output"] = self.blocks
        response["usage"] = _usage(self._prompt_tokens, end, self._cached_tokens())
        return self._named(f"response.{response['status']}", response=response)

    def failure(self, error: ServingError) -> bytes:
        last = self._close(whole=False)
        self._response["status"] = "failed"
        self._response["error"] = {"code": error.responses_code, "message": str(error)}
        self._response["output"] = self.blocks
        return last + self._named("response.failed", response=self._response)

    def _new_item(self, kind: Kind, name: str) -> OutputItem:
        item_id = _PREFIXES[kind] + secrets.token_hex(12)
        if kind is Kind.TEXT:
            return {"id": item_id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        if kind is Kind.REASONING:
            return {"id": item_id, "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
        namespace, own = self._origins.get(name, (None, name))
        call: CallItem = {
            "id": item_id,
            "type": "function_call",
            "status": "in_progress",
            "call_id": new_call_id(),
            "name": own,
            "arguments": "",
        }
        if namespace is not None:
            call["namespace"] = namespace
        return call

    def _named(self, name: str, /, **fields: object) -> bytes:
        sequence, self._sequence = self._sequence, self._sequence + 1
        event = orjson.dumps({"type": name, "sequence_number": sequence, **fields})
        return b"event: %b\ndata: %b\n\n" % (name.encode(), event)


def _usage(prompt_tokens: int, end: AnswerEnd, cached_tokens: int) -> ResponseUsage:
    """Token counts; a count that is not kept is 0."""
    generated_tokens = end.ending.generated_tokens
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
        "output_tokens": generated_tokens,
        "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
        "total_tokens": prompt_tokens + generated_tokens,
    }


def _output_text(text: str, logprobs: orjson.Fragment) -> OutputText:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _reasoning_text(text: str) -> ReasoningText:
    return {"type": "reasoning_text", "text": text}


def _new_response(body: ResponsesBody, named: Named) -> ResponseAnswer:
    """A response without output: the requested settings, with defaults."""
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
        "text": _repeated({"format": (body.text.format if body.text is not None else None) or {"type": "text"}}),
        "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump(),
        "tools": _repeated([as_sent(tool) for tool in body.tools or ()]),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": _number(body.top_p),
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def _repeated(value: object) -> orjson.Fragment:
    """A value of the request, written once."""
    return orjson.Fragment(orjson.dumps(value))


def _number(value: float | None) -> float:
    """The number as the client wrote it: a float32 has seven digits."""
    return 1.0 if value is None else float(f"{value:.7g}")
