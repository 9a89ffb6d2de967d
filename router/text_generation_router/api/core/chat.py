"""Chats of every dialect: from a Conversation to requests, and from their text to events.

    Conversation ──template──► prompt ──preparer───► Request × n
                                                        │ outputs
    chat, responses, messages ◄── events ── Reader ◄────┘

A dialect streams the events through an EventSink, or collects the text and calls `ChatRequest.answer`.
"""

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

import orjson

from text_generation_proto.values import FinishReason, Grammar, GrammarKind
from text_generation_router.api.core.parameters import INPUTS, GenerationOptions
from text_generation_router.api.core.serving import Serving
from text_generation_router.chat.conversation import Conversation, Json, Tool, ToolMode
from text_generation_router.chat.events import Event, Kind, OutputParser, ReasoningTokens
from text_generation_router.chat.parsers import FORMATS, begun_answer
from text_generation_router.chat.parsers.base import AnyTools, Tools
from text_generation_router.chat.parsers.reasoning import END_THINK, THINK, FirstCall, ReasoningParser
from text_generation_router.chat.parsers.syntax import Pieces, Repeat, Slot, Until
from text_generation_router.chat.template import TemplateRenderer
from text_generation_router.errors import InvalidRequest, ServingError, ToolError
from text_generation_router.generation import GenerationResult, Sink, TokenOutput
from text_generation_router.grammar.tools import auto_tools, calls_or_answer, check_number, forced_tools
from text_generation_router.large_inputs import run_in_thread_if_large
from text_generation_router.request import QualityOfService, Request, TenantId, TokenId
from text_generation_router.web.body_errors import about

PLAIN = "plain"
PARSED_AT_ONCE = 4096
"""Characters of a whole answer that are parsed without a pause."""
MAX_INLINE_TOOLS = 1 << 14
"""Characters of a prompt with tools whose grammar is written on the event loop: a few milliseconds."""
HERMES_CALL = ("<tool_call>\n", "\n</tool_call>")


class Finish(Enum):
    """Reasons why an answer ended; the values are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    finish: Finish
    ending: GenerationResult
    reasoning_tokens: int = 0


class EventSink(Protocol):
    """A consumer of one answer's events. Called on the event loop; must neither block nor raise.

    `on_end` or `on_failure` is the last call.
    """

    def on_events(self, events: Sequence[Event], output: TokenOutput) -> None:
        """Take the events of one new token: often one, at times none or several."""
        ...

    def on_end(self, end: AnswerEnd) -> None: ...
    def on_failure(self, error: ServingError) -> None: ...


class Reader(Sink):
    """A sink of outputs that parses them into events."""

    def __init__(self, parser: OutputParser, sink: EventSink) -> None:
        self._parser = parser
        self._sink = sink
        self._calls = False
        self._reasoning = ReasoningTokens()

    def on_output(self, output: TokenOutput) -> None:
        events: Sequence[Event] = self._parser.feed(output.delta) if output.delta else ()
        if output.ending is not None:
            events = [*events, *self._parser.finish()]
        if events:
            self._calls = self._calls or any(event.kind is Kind.CALL for event in events)
        self._reasoning.add(events)
        self._sink.on_events(events, output)
        if output.ending is not None:
            finish = finish_of(output.ending, calls=self._calls)
            self._sink.on_end(AnswerEnd(finish, output.ending, self._reasoning.count))

    def on_failure(self, error: ServingError) -> None:
        self._sink.on_failure(error)


@dataclass(slots=True)
class Call:
    """A tool call of a whole answer."""

    name: str
    arguments: str


@dataclass(slots=True)
class ParsedAnswer:
    finish: Finish
    text: str
    reasoning: str
    calls: list[Call]
    reasoning_tokens: int


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A validated chat: one request per answer."""

    requests: Sequence[Request]
    prompt: str
    form: "AnswerForm"

    @property
    def prompt_tokens(self) -> int:
        return len(self.requests[0].prompt)

    async def read(self, ending: GenerationResult) -> tuple[Sequence[Event], AnswerEnd]:
        """Return the events and the end of a finished text. Other requests run between two pieces of it."""
        parser, events = self.form.parser(), list[Event]()
        for start in range(0, len(ending.text), PARSED_AT_ONCE):
            if start:
                await asyncio.sleep(0)
            events += parser.feed(ending.text[start : start + PARSED_AT_ONCE])
        events += parser.finish()
        kinds = {event.kind for event in events}
        tokens = await self._reasoning_tokens(ending.deltas) if Kind.REASONING in kinds else 0
        return events, AnswerEnd(finish_of(ending, calls=Kind.CALL in kinds), ending, tokens)

    async def _reasoning_tokens(self, deltas: Sequence[str]) -> int:
        """Count the reasoning tokens of a finished text, as a stream of it does."""
        parser, tokens = self.form.parser(), ReasoningTokens()
        for number, delta in enumerate(deltas, 1):
            if number % PARSED_AT_ONCE == 0:
                await asyncio.sleep(0)
            events = parser.feed(delta) if delta else ()
            tokens.add([*events, *parser.finish()] if number == len(deltas) else events)
        return tokens.count

    async def answer(self, ending: GenerationResult) -> ParsedAnswer:
        events, end = await self.read(ending)
        joined: dict[tuple[Kind, int], list[str]] = {}
        for kind, text, call in events:
            joined.setdefault((kind, call), []).append(text)

        def whole(kind: Kind, call: int = 0) -> str:
            return "".join(joined.get((kind, call), ()))

        calls = [Call(event.text, whole(Kind.ARGUMENTS, event.call)) for event in events if event.kind is Kind.CALL]
        return ParsedAnswer(end.finish, whole(Kind.TEXT), whole(Kind.REASONING), calls, end.reasoning_tokens)


@dataclass(frozen=True, slots=True)
class AnswerForm:
    format: str = PLAIN
    """The name of the format of calls, or of text."""
    tools: Tools = field(default_factory=dict)
    reasoning: tuple[str, str] | None = None
    """The markers of the reasoning; None: it is not split from the text, or `format` has its own."""
    starts_inside: bool = False
    """The prompt ends inside the reasoning."""
    one_call: bool = False
    """Report only the first tool call."""
    begun: str = ""
    """The part of the answer that is the end of the prompt."""

    @property
    def is_plain(self) -> bool:
        """True if an answer is text only."""
        return self.format == PLAIN and self.reasoning is None

    def parser(self) -> OutputParser:
        inner = FORMATS[self.format].parser(self.tools)
        if any(event.kind is Kind.CALL for event in inner.feed(self.begun)):
            # The prompt has calls of its own, which are not the answer's: those are numbered from 0.
            inner = FORMATS[self.format].parser(self.tools)
        if self.reasoning is not None:
            start, end = self.reasoning
            inner = ReasoningParser(inner, start=start, end=end, starts_inside=self.starts_inside)
        return FirstCall(inner) if self.one_call else inner


@dataclass(frozen=True, slots=True)
class ChatPreparer:
    serving: Serving
    renderer: TemplateRenderer
    call_format: str
    """The format of unconstrained tool calls of this model."""
    reasoning: tuple[str, str] | None
    """The markers of the reasoning that is split from the text."""

    async def prompt(self, conversation: Conversation, tenant: TenantId) -> str:
        """Return the prompt text, in which images have no tokens yet. Raises TemplateError, ToolError, Overloaded, CannotKeepUp."""
        return (await self._rendered(conversation, _usable_tools(conversation), tenant))[1]

    async def count_tokens(self, conversation: Conversation, tenant: TenantId) -> int:
        """Return the number of tokens of the prompt. Raises as `prompt` does; InvalidRequest, Overloaded for its images."""
        shown, prompt = await self._rendered(conversation, _usable_tools(conversation), tenant)
        images = shown.images
        # Images take memory like those of an answer.
        async with self.serving.permits.take(1, tenant) if images else nullcontext():
            return await self.serving.preparer.count_tokens(prompt, images, tenant)

    async def _rendered(
        self, conversation: Conversation, tools: Sequence[Tool], tenant: TenantId
    ) -> tuple[Conversation, str]:
        """Return the chat as the template gets it, and the prompt text."""
        shown = self.serving.preparer.with_images(replace(conversation, tools=tools))
        return shown, await self.renderer.render(shown, tenant)

    async def prepare(
        self, conversation: Conversation, options: GenerationOptions, qos: QualityOfService, count: int = 1
    ) -> ChatRequest:
        """Return a chat with `count` answers. The caller holds their permits. Raises ServingError."""
        tools = _usable_tools(conversation)
        with about(INPUTS[options.api]):
            shown, text = await self._rendered(conversation, tools, qos.tenant)
        field = _grammar_field(conversation, tools, options.grammar_field)
        with about(field):
            form, grammar, continuation = await self._constrained(conversation, tools, text, qos.tenant)
        prompt = text + continuation
        visible = self._visible_special(form.parser())
        options = replace(
            options, add_special_tokens=False, grammar=grammar, grammar_field=field, visible_special=visible
        )
        requests = await self.serving.preparer.prepare(prompt, options, qos, count, shown.images)
        requests[1:] = [replace(request, logprobs=request.logprobs.without_prompt()) for request in requests[1:]]
        if self.serving.settings.limits.marks_turns and conversation.add_generation_prompt:
            endings = await self.renderer.unrepeated_endings(shown, text, qos.tenant)
            ends = {await self.serving.preparer.tokens_before(each + continuation, requests[0]) for each in endings}
            requests = [replace(request, turn_ends=tuple(sorted(ends))) for request in requests]
        return ChatRequest(requests, prompt, form)

    async def _constrained(
        self, conversation: Conversation, tools: Sequence[Tool], prompt: str, tenant: TenantId
    ) -> "tuple[AnswerForm, Grammar | None, str]":
        """Return the same as `_form`, whose calls follow their schemas in a grammar if the engine can follow them."""
        # A prompt shows its tools, so it is long if their grammar is.
        large = bool(tools) and len(prompt) > MAX_INLINE_TOOLS
        if conversation.grammar is not None and not all(tool.strict for tool in tools):
            strict = [replace(tool, strict=True) for tool in tools]
            with suppress(InvalidRequest):
                form, grammar, continuation = await run_in_thread_if_large(
                    lambda: self._form(conversation, strict, prompt), large=large
                )
                if grammar is not None:
                    grammar = await self.serving.preparer.proven(grammar, tenant)
                return form, grammar, continuation
        return await run_in_thread_if_large(lambda: self._form(conversation, tools, prompt), large=large)

    def _form(
        self, conversation: Conversation, tools: Sequence[Tool], prompt: str
    ) -> "tuple[AnswerForm, Grammar | None, str]":
        """Return the format of the answer, its grammar, and what continues the prompt before it."""
        own = FORMATS[self.call_format]
        schemas = {tool.name: tool.parameters for tool in tools}
        one_call = not conversation.parallel_tool_calls
        markers = self.reasoning or (THINK, END_THINK)
        starts_inside = prompt.rstrip().endswith(markers[0])
        begun = begun_answer(prompt, own.assistant)
        # A constrained answer leaves no room for reasoning.
        continuation = f"\n{markers[1]}\n\n" if starts_inside else ""
        if tools and _is_forced(conversation):
            form = AnswerForm("json_calls", schemas, one_call=one_call)
            return form, forced_tools(tools), continuation + own.call_start
        grammar = conversation.grammar
        if grammar is not None and (not tools or begun):
            return AnswerForm(), grammar, continuation + ("" if begun else own.answer_start)
        if grammar is None:
            continuation = ""
            grammar = self._strict_calls(tools, markers)
        else:
            before: Pieces = (Repeat(own.thought),) if own.thought else ()
            if self.reasoning is not None and not own.has_channels:
                rest = (Until(markers[1]), Slot.GAP)
                before = rest if starts_inside else (Repeat((markers[0], *rest)),)
                continuation = ""
            grammar = calls_or_answer(
                tools,
                own.calls,
                grammar,
                self.serving.tokenizer.markers,
                before=before,
                answer_start=own.answer_start,
                one_call=one_call,
            )
        # Calls of tools that the request does not have are calls.
        any_tool = self.serving.settings.config.forward_unknown_tools and not own.unmarked
        form = AnswerForm(
            self.call_format if tools or own.has_channels else PLAIN,
            AnyTools(schemas) if tools and any_tool else schemas,
            None if own.has_channels else self.reasoning,
            starts_inside,
            one_call,
            begun,
        )
        return form, grammar, continuation

    def _strict_calls(self, tools: Sequence[Tool], reasoning: Sequence[str]) -> Grammar | None:
        """Return a grammar for free text with calls, if all tools are strict and the calls are JSON in markers."""
        serves = self.call_format == "hermes" and self.serving.preparer.serves_grammar(GrammarKind.LARK)
        if not tools or not serves or not all(tool.strict for tool in tools):
            return None
        return auto_tools(tools, *HERMES_CALL, self.serving.tokenizer.markers, reasoning)

    def _visible_special(self, parser: OutputParser) -> frozenset[TokenId]:
        markers = parser.markers
        if not markers:
            return frozenset()
        return frozenset(token_id for token_id, text in self.serving.tokenizer.special_texts.items() if text in markers)


def finish_of(ending: GenerationResult, *, calls: bool) -> Finish:
    """Return the finish reason. A text that hit its length limit never counts as a whole tool call."""
    if ending.reason is FinishReason.LENGTH:
        return Finish.LENGTH
    return Finish.TOOL_CALLS if calls else Finish.STOP


def read_tool(name: str, description: str | None, parameters: Json | None, *, strict: bool = False) -> Tool:
    """Return a tool of a request. Raises InvalidRequest if its parameters cannot be written as JSON again."""
    try:
        orjson.dumps(parameters)
    except orjson.JSONEncodeError as error:  # templates and grammars write it
        raise InvalidRequest(f"the parameters of tool {name!r} are nested too deep", param="tools") from error
    return Tool(name, description, parameters or {}, strict=strict)


def tool_call(call_id: str, name: str, arguments: object) -> Json:
    """Return a call as chat templates expect it in a message; `arguments` is an object."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _usable_tools(conversation: Conversation) -> Sequence[Tool]:
    """Return the tools that the model may call. Raises ToolError, InvalidRequest."""
    tools, choice = conversation.tools, conversation.tool_choice
    if choice.mode is ToolMode.NONE:
        return ()
    check_number(tools)
    if choice.mode is ToolMode.NAMED:
        named = [tool for tool in tools if tool.name == choice.name]
        if not named:
            raise ToolError(f"Tool with name {choice.name} not found", param=choice.field)
        return named
    allowed = [tool for tool in tools if choice.allowed is None or tool.name in choice.allowed]
    if choice.mode is ToolMode.REQUIRED and not allowed:
        raise InvalidRequest("`tool_choice` requires a call, but there are no `tools` for it")
    return allowed


def _is_forced(conversation: Conversation) -> bool:
    return conversation.tool_choice.mode in (ToolMode.NAMED, ToolMode.REQUIRED)


def _grammar_field(conversation: Conversation, tools: Sequence[Tool], field: str | None) -> str | None:
    """Return the field that the grammar of an answer is made of, `field` or `tools`; None: of both.

    A schema of a tool that is not strict gives way to any object, so that no error is about it.
    """
    if not tools:
        return field
    if conversation.grammar is None or _is_forced(conversation):
        return "tools"
    return None if all(tool.strict for tool in tools) else field
