"""The callable tools of a Responses body, and calls of functions in a namespace."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from answer_events import RESPONSES, ending, write_answer
from openai.types.responses import FunctionTool, NamespaceTool, Response, Tool
from pydantic import ValidationError

from text_generation_router.api.core.chat import Finish
from text_generation_router.api.core.ids import Named
from text_generation_router.api.openai.responses_events import ResponseWriter
from text_generation_router.api.openai.responses_input import HOSTED, to_conversation
from text_generation_router.api.openai.responses_schemas import MAX_ITEMS, ResponsesBody
from text_generation_router.api.openai.schemas import MAX_PARTS
from text_generation_router.chat.conversation import ToolChoice, ToolMode
from text_generation_router.chat.events import Event, Kind
from text_generation_router.errors import InvalidRequest

Json = dict[str, Any]

NAMED = Named("resp_1", 1_700_000_000, "some-model", "native")


def function(name: str, **more: object) -> Json:
    return {"type": "function", "name": name, "strict": False, "parameters": {"type": "object"}, **more}


def namespace(name: str, *tools: Json) -> Json:
    return {"type": "namespace", "name": name, "description": "Some tools.", "tools": list(tools)}


CODING = [
    function("exec_command", description="Runs a command."),
    namespace("multi_agent_v1", function("close_agent"), function("send_input", output_schema={"a": [1]})),
    {"type": "web_search", "external_web_access": False},
]
"""Tools of a coding agent."""


def body(**fields: object) -> ResponsesBody:
    return ResponsesBody.model_validate({"input": "Hi", **fields})


def names(*tools: Json) -> list[str]:
    return [tool.name for tool in to_conversation(body(tools=list(tools))).tools]


def test_functions_of_a_namespace_keep_names_that_no_other_tool_has() -> None:
    assert names(*CODING) == ["exec_command", "close_agent", "send_input"]
    tools = (function("f"), namespace("a", function("f"), function("g"), function("h")), namespace("b", function("g")))
    assert names(*tools) == ["f", "a__f", "a__g", "h", "b__g"]


def test_qualified_names_may_be_long() -> None:
    long = "n" * 256
    assert names(namespace(long, function(long)), namespace("b", function(long))) == [f"{long}__{long}", f"b__{long}"]


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([namespace("a", function("f"), function("f"))], "several tools would have the name 'a__f'"),
        (
            [function("a__f"), namespace("a", function("f")), namespace("b", function("f"))],
            "several tools would have the name 'a__f'",
        ),
        ([{"type": "namespace", "tools": []}], "a tool of type `namespace` has no `name`"),
        ([namespace("a", {"type": "function"})], "a tool of type `function` has no `name`"),
        ([namespace("a", namespace("b"))], "cannot hold another"),
        ([namespace("a", {"type": "funktion", "name": "f"})], "tools of type 'funktion' are not supported"),
    ],
)
def test_ambiguous_and_unknown_tools_are_refused(tools: list[Json], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        to_conversation(body(tools=tools))


def test_hosted_tools_are_left_out() -> None:
    kinds = {
        kind
        for member in get_args(get_args(Tool)[0])
        if member not in (FunctionTool, NamespaceTool)
        for kind in get_args(member.model_fields["type"].annotation)
    }
    assert len(kinds) > 10
    assert kinds <= set(HOSTED)
    for choice in ("auto", "none", None):
        conversation = to_conversation(body(tools=[{"type": kind} for kind in sorted(kinds)], tool_choice=choice))
        assert not conversation.tools


def test_allowed_tools_are_those_with_a_name() -> None:
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "mcp"}, {"type": "function", "name": "f"}],
    }
    conversation = to_conversation(body(tools=[function("f"), function("g")], tool_choice=allowed))
    assert conversation.tool_choice == ToolChoice(ToolMode.REQUIRED, allowed={"f"})


def test_a_hosted_tool_cannot_be_required() -> None:
    search = {"type": "web_search"}
    with pytest.raises(InvalidRequest, match="tools of type 'web_search' are not supported"):
        to_conversation(body(tools=[search], tool_choice="required"))
    with pytest.raises(InvalidRequest, match="a tool choice of type 'web_search' is not supported"):
        to_conversation(body(tools=[search, function("f")], tool_choice=search))
    assert (
        to_conversation(body(tools=[search, function("f")], tool_choice="required")).tool_choice.mode
        is ToolMode.REQUIRED
    )


def test_a_call_in_the_input_has_the_name_that_the_model_used() -> None:
    tools = [function("f"), namespace("a", function("f"), function("g"))]
    calls = [(None, "f"), ("a", "f"), ("a", "g"), ("gone", "g")]
    items: list[Json] = []
    for index, (space, name) in enumerate(calls):
        items.append({"type": "function_call", "call_id": f"c{index}", "name": name, "arguments": "{}"})
        items[-1] |= {} if space is None else {"namespace": space}
    items.append({"type": "function_call_output", "call_id": "c1", "output": "done"})
    said, result = to_conversation(body(input=items, tools=tools)).messages
    assert [call["function"]["name"] for call in said["tool_calls"]] == ["f", "a__f", "g", "gone__g"]
    assert result["name"] == "a__f"


def written(tools: list[Json], called: str) -> tuple[list[Json], Json]:
    """Return the events of a stream that calls the function of this name, and the whole reply."""
    writer = ResponseWriter(body(tools=tools), NAMED, 7, lambda: 0)
    events: list[Event] = [Event(Kind.TEXT, "Hm."), Event(Kind.CALL, called), Event(Kind.ARGUMENTS, "{}")]
    return write_answer(writer, events, ending(Finish.TOOL_CALLS), RESPONSES, Response)


@pytest.mark.parametrize(
    ("called", "name", "space"),
    [("send_input", "send_input", "multi_agent_v1"), ("exec_command", "exec_command", None), ("a__f", "f", "a")],
)
def test_a_call_is_reported_with_its_functions_name_and_namespace(called: str, name: str, space: str | None) -> None:
    read, whole = written([*CODING, namespace("a", function("f")), namespace("b", function("f"))], called)
    items = [event["item"] for event in read if event["type"].startswith("response.output_item.")]
    calls = [item for item in [*items, *whole["output"]] if item["type"] == "function_call"]
    assert len(calls) == 3
    for call in calls:
        assert (call["name"], call.get("namespace")) == (name, space)
        assert ("namespace" in call) == (space is not None)
    [done] = [event for event in read if event["type"] == "response.function_call_arguments.done"]
    assert done["name"] == name


def test_tools_are_repeated_as_they_were_sent() -> None:
    tools = [*CODING, {"type": "mcp", "server_label": "x", "server_url": "https://example.org", "headers": None}]
    _, whole = written(tools, "exec_command")
    assert whole["tools"] == tools


def test_thousands_of_calls_are_one_message() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    [said] = to_conversation(body(input=[call] * MAX_ITEMS)).messages
    assert len(said["tool_calls"]) == MAX_ITEMS


def test_an_input_has_limits() -> None:
    part = {"type": "input_text", "text": "x"}
    message = {"role": "user", "content": [part] * MAX_PARTS}
    to_conversation(body(input=[message]))
    for too_many in (
        [{"role": "user"}] * (MAX_ITEMS + 1),
        [{"role": "user", "content": [part] * (MAX_PARTS + 1)}],
        [{"type": "function_call_output", "call_id": "c", "output": [part] * (MAX_PARTS + 1)}],
        [{"type": "reasoning", "summary": [part] * (MAX_PARTS + 1)}],
    ):
        with pytest.raises(ValidationError, match="at most 10000 items"):
            body(input=too_many)


@pytest.mark.parametrize("arguments", ["", "null", None, "{}"])
def test_a_call_without_arguments_has_an_empty_object(arguments: str | None) -> None:
    """Templates read the members of arguments."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    [message] = to_conversation(ResponsesBody(input=[call])).messages
    assert message["tool_calls"][0]["function"]["arguments"] == {}
