"""Responses bodies as conversations and options. Several items can make one chat message.

The tools of a body are those that the model may call, and their names:

    function      called by its own name
    namespace     its functions, each by its own name if no other tool has it, else by `<namespace>__<name>`
    hosted        tools that OpenAI runs, or that need its own models: left out

A reported call has the function's own name and its namespace.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from text_generation_proto.parameters import Api
from text_generation_proto.values import LogprobOptions
from text_generation_router.api.core.chat import read_tool, tool_call
from text_generation_router.api.core.parameters import GenerationOptions, open_sampling
from text_generation_router.api.openai.input import new_message, read_arguments
from text_generation_router.api.openai.responses_schemas import (
    HOSTED,
    AllowedFunctions,
    AnyTool,
    FunctionTool,
    InputItem,
    NamedFunction,
    ResponsesBody,
)
from text_generation_router.api.openai.schemas import ContentPart
from text_generation_router.chat.conversation import Conversation, Json, Tool, ToolChoice, ToolMode
from text_generation_router.errors import InvalidRequest, NotSupported
from text_generation_router.grammar.forms import response_format
from text_generation_router.web.bodies import pop_each
from text_generation_router.web.body_errors import about
from text_generation_router.web.structure import JsonTexts

Origin = tuple[str | None, str]
"""The namespace of a function, if any, and its own name."""

ROLES = ("user", "assistant", "system", "developer")
FORMAT = "text.format"
"""The field of the grammar."""
LOGPROBS = "message.output_text.logprobs"
INCLUDED = (
    *(LOGPROBS, "reasoning.encrypted_content", "code_interpreter_call.outputs", "file_search_call.results"),
    *("computer_call_output.output.image_url", "message.input_image.image_url"),
    *("web_search_call.action.sources", "web_search_call.results"),
)
"""The words of `include`. The others are about what this server never writes, so that nothing is left out."""


@dataclass(frozen=True, slots=True)
class CallableTools:
    """The functions that the model may call."""

    tools: Sequence[Tool]
    """The functions, with the names that the model uses."""
    names: Mapping[Origin, str]
    """Function in a namespace → name that the model uses."""
    origins: Mapping[str, Origin]
    """The inverse of `names`."""
    left_out: Sequence[str]
    """Types of the tools that were left out."""

    def name_of(self, namespace: str | None, name: str) -> str:
        """Return the name that the model uses for a function of this or an earlier request."""
        if namespace is None:
            return name
        return self.names.get((namespace, name)) or _qualified(namespace, name)

    def choice(self, choice: str | AllowedFunctions | NamedFunction | None) -> ToolChoice:
        """Return the tool choice of a chat. Raises InvalidRequest if no tool satisfies it."""
        if isinstance(choice, NamedFunction):
            if choice.type != "function":
                raise InvalidRequest(f"a tool choice of type {choice.type[:32]!r} is not supported")
            if choice.name is None:
                raise InvalidRequest("a tool choice of type `function` has no `name`")
            return ToolChoice(ToolMode.NAMED, choice.name)
        mode = ToolMode((choice.mode if isinstance(choice, AllowedFunctions) else choice) or "auto")
        if mode is ToolMode.REQUIRED and self.left_out and not self.tools:
            raise InvalidRequest(
                f"`tool_choice` is `required`, but tools of type {self.left_out[0]!r} are not supported"
            )
        if isinstance(choice, AllowedFunctions):
            return ToolChoice(mode, allowed=frozenset(tool.name for tool in choice.tools if tool.name is not None))
        return ToolChoice(mode)


def callable_tools(tools: Sequence[AnyTool]) -> CallableTools:
    """Return the callable tools. Raises InvalidRequest for a type that is neither callable nor hosted."""
    functions: list[tuple[str | None, FunctionTool]] = []
    left_out: list[str] = []
    for namespace, tool in _flat(tools):
        if tool.type == "function":
            functions.append((namespace, tool))
        elif tool.type in HOSTED:
            left_out.append(tool.type)
        else:
            raise InvalidRequest(f"tools of type {tool.type[:32]!r} are not supported", code="unsupported_value")
    holders = Counter(tool.name for _, tool in functions)
    names: dict[Origin, str] = {}
    taken = {tool.name for namespace, tool in functions if namespace is None}
    found: list[Tool] = []
    for namespace, tool in functions:
        name = tool.name
        if name is None:
            raise InvalidRequest("a tool of type `function` has no `name`")
        own = name
        if namespace is not None:
            if holders[own] > 1:
                name = _qualified(namespace, own)
            if name in taken:
                raise InvalidRequest(f"several tools would have the name {name[:64]!r}")
            taken.add(name)
            names[namespace, own] = name
        found.append(read_tool(name, tool.description, tool.parameters, strict=bool(tool.strict)))
    return CallableTools(found, names, {name: origin for origin, name in names.items()}, left_out)


def as_sent(tool: FunctionTool) -> dict[str, Any]:
    """Return a tool as the client sent it, for the answer; a function gets all of OpenAI's fields."""
    # Not model_dump: pydantic fails on deep nesting.
    sent = {name: value for name, value in tool if name in tool.model_fields_set}
    if isinstance(tool, AnyTool):
        if tool.type == "function":
            sent = {"type": "", "name": None, "description": None, "parameters": None, "strict": None} | sent
        if tool.tools is not None:
            sent["tools"] = [as_sent(inner) for inner in tool.tools]
    return sent


def _flat(tools: Sequence[AnyTool]) -> Iterator[tuple[str | None, FunctionTool]]:
    for tool in tools:
        if tool.type != "namespace":
            yield None, tool
            continue
        if tool.name is None:
            raise InvalidRequest("a tool of type `namespace` has no `name`")
        for inner in tool.tools or ():
            if inner.type == "namespace":
                raise InvalidRequest("a tool of type `namespace` cannot hold another")
            yield tool.name, inner


def _qualified(namespace: str, name: str) -> str:
    return f"{namespace}__{name}"


def to_options(body: ResponsesBody) -> GenerationOptions:
    return GenerationOptions(
        api=Api.RESPONSES,
        sampling=open_sampling(body, Api.RESPONSES),
        max_new_tokens=body.max_output_tokens,
        length_field="max_output_tokens",
        logprobs=LogprobOptions(body.top_logprobs or 0, tokens=asks_for_logprobs(body)),
        grammar_field=FORMAT,
    )


def asks_for_logprobs(body: ResponsesBody) -> bool:
    """Return True if the response shows the log-probabilities of its tokens."""
    return LOGPROBS in (body.include or ()) or bool(body.top_logprobs)


def to_conversation(body: ResponsesBody) -> Conversation:
    """Return the conversation of a body. Raises InvalidRequest, naming what is not supported."""
    _refuse_what_needs_a_store(body)
    with about("tools"):
        tools = callable_tools(body.tools or ())
    messages = [new_message("system", body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        messages.append(new_message("user", body.input))
    else:
        collected = _Messages(messages, tools)
        with about("input"):
            for item in pop_each(body.input):
                collected.add(item)
    if not messages:
        raise InvalidRequest("`input` cannot be empty")
    with about("tool_choice"):
        choice = tools.choice(body.tool_choice)
    form = None if body.text is None else body.text.format
    with about(FORMAT):
        grammar = None if form is None else response_format(form)
    effort = None if body.reasoning is None else body.reasoning.effort
    return Conversation(
        messages=messages,
        tools=tools.tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        grammar=grammar,
        continue_final_message=False,  # an answer is always a new item
        template_kwargs={} if effort is None else {"reasoning_effort": effort},
    )


def _refuse_what_needs_a_store(body: ResponsesBody) -> None:
    for name, value, advice in (
        ("previous_response_id", body.previous_response_id, "responses are not stored. Send the whole `input`"),
        ("conversation", body.conversation, "conversations are not stored. Send the whole `input`"),
        ("prompt", body.prompt, "templates of prompts are not stored. Send their text as `instructions` and `input`"),
        ("background", body.background or None, "responses are not stored. Wait for the response, or `stream` it"),
    ):
        if value is not None:
            raise NotSupported(f"`{name}` is not supported: {advice}")
    for word in body.include or ():
        if word not in INCLUDED:
            known = ", ".join(f"`{known}`" for known in INCLUDED)
            raise InvalidRequest(f"`include` must have only {known}. Given: {word[:64]!r}")


class _Messages:
    """Collects items into messages. An assistant message stays open as long as only its calls follow."""

    def __init__(self, messages: list[Json], tools: CallableTools) -> None:
        """Append to `messages`."""
        self._messages = messages
        self._tools = tools
        self._texts = JsonTexts()
        self._names: dict[str, str] = {}
        """Function names by call id."""
        self._thoughts: list[str] = []
        self._open: Json | None = None

    def add(self, item: InputItem) -> None:
        """Add the next item. Raises InvalidRequest."""
        match item.type or "message":
            case "reasoning":
                self._thoughts.append(_reasoning(item))
                return
            case "message":
                self._message(item)
            case "function_call":
                self._call(item)
            case "function_call_output":
                self._output(item)
            case other:
                raise InvalidRequest(f"input items of type {other[:32]!r} are not supported", code="unsupported_value")
        self._thoughts.clear()

    def _message(self, item: InputItem) -> None:
        if item.role not in ROLES:
            known = ", ".join(f"`{role}`" for role in ROLES)
            said = f"the role of an input message must be one of {known}. Given: {str(item.role)[:32]!r}"
            raise InvalidRequest(said)
        if item.role == "assistant":
            self._begin(item.content)
        else:
            self._open = None
            self._messages.append(new_message(item.role, item.content))

    def _call(self, item: InputItem) -> None:
        if item.call_id is None or item.name is None:
            raise InvalidRequest("an input item of type `function_call` needs `call_id` and `name`")
        name = self._tools.name_of(item.namespace, item.name)
        self._names[item.call_id] = name
        message = self._begin(None) if self._open is None else self._open
        message.setdefault("tool_calls", []).append(
            tool_call(item.call_id, name, read_arguments(item.arguments, self._texts))
        )

    def _output(self, item: InputItem) -> None:
        if item.call_id is None:
            raise InvalidRequest("an input item of type `function_call_output` has no `call_id`")
        self._open = None
        named = {"name": self._names[item.call_id]} if item.call_id in self._names else {}
        self._messages.append(new_message("tool", item.output) | named | {"tool_call_id": item.call_id})

    def _begin(self, content: str | Sequence[ContentPart] | None) -> Json:
        """Open an assistant message with the thoughts before it."""
        thought = "".join(self._thoughts)
        self._open = new_message("assistant", content) | ({"reasoning_content": thought} if thought else {})
        self._messages.append(self._open)
        return self._open


def _reasoning(item: InputItem) -> str:
    if isinstance(item.content, str):
        return item.content
    parts: Sequence[ContentPart] = item.content or item.summary or ()
    return "".join(part.text or "" for part in parts)
