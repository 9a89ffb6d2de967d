"""The tools of a Responses body: those that the model may call, and their names.

    function      called by its own name
    namespace     its functions, each by its own name if no other tool has it, else by `<namespace>__<name>`
    hosted        tools that OpenAI runs, or that need its own models: left out

A reported call has the function's own name and its namespace.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from text_generation_router.api.core.chat import read_tool
from text_generation_router.api.openai.responses_schemas import (
    HOSTED,
    AllowedFunctions,
    AnyTool,
    FunctionTool,
    NamedFunction,
)
from text_generation_router.chat.conversation import Tool, ToolChoice, ToolMode
from text_generation_router.errors import InvalidRequest

Origin = tuple[str | None, str]
"""The namespace of a function, if any, and its own name."""


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
