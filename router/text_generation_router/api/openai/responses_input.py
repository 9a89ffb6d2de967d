"""A Responses body in the words of OpenAI's chats, which have a message for what are several items here."""

from __future__ import annotations

from collections.abc import Sequence

from text_generation_router.api.openai.one_answer import Asked
from text_generation_router.api.openai.responses_schemas import FunctionTool, InputItem, NamedFunction, ResponsesBody
from text_generation_router.api.openai.schemas import (
    ChatBody,
    ContentPart,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    Message,
    NamedToolChoice,
    ToolCall,
    ToolDefinition,
)
from text_generation_router.errors import InvalidRequest
from text_generation_router.grammar.forms import response_format

ROLES = ("user", "assistant", "system", "developer")
LOGPROBS = "message.output_text.logprobs"


def to_asked(body: ResponsesBody) -> Asked:
    """What a body asks for. Raises InvalidRequest for what cannot be done, by name."""
    _refuse_what_needs_a_store(body)
    _refuse_logprobs(body)
    messages = [Message(role="system", content=body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        messages.append(Message(role="user", content=body.input))
    else:
        messages += _messages(body.input)
    if not messages:
        raise InvalidRequest("`input` cannot be empty")
    # Built from values that were validated already.
    chat = ChatBody.model_construct(
        messages=messages,
        temperature=body.temperature,
        top_p=body.top_p,
        max_tokens=body.max_output_tokens,
        tools=[_tool(tool) for tool in body.tools or ()],
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        continue_final_message=False,  # an answer is always an item of its own
    )
    form = None if body.text is None else body.text.format
    return Asked(chat, None if form is None else response_format(form))


def _refuse_what_needs_a_store(body: ResponsesBody) -> None:
    for name, value in (
        ("previous_response_id", body.previous_response_id),
        ("conversation", body.conversation),
        ("prompt", body.prompt),
        ("background", body.background or None),
    ):
        if value is not None:
            raise InvalidRequest(f"`{name}` is not supported: responses are not stored. Send the whole `input`")


def _refuse_logprobs(body: ResponsesBody) -> None:
    if LOGPROBS in (body.include or ()):
        raise InvalidRequest(f"`include` of {LOGPROBS!r} is not supported: ask /v1/chat/completions for `logprobs`")
    if body.top_logprobs:
        raise InvalidRequest("`top_logprobs` is not supported: ask /v1/chat/completions for `logprobs`")


def _messages(items: Sequence[InputItem]) -> list[Message]:
    messages: list[Message] = []
    names: dict[str, str] = {}
    reasoning = ""
    calls_go_on = False
    """The last message is the assistant's and takes further calls."""
    for item in items:
        match item.type or "message":
            case "reasoning":
                reasoning += _reasoning(item)
                continue
            case "message":
                message = _message(item, reasoning)
                messages.append(message)
                calls_go_on = message.role == "assistant"
            case "function_call":
                call = _call(item)
                names[str(call.id)] = call.function.name
                if calls_go_on:
                    messages[-1] = _with_call(messages[-1], call)
                else:
                    messages.append(Message(role="assistant", tool_calls=[call], reasoning_content=reasoning or None))
                calls_go_on = True
            case "function_call_output":
                if item.call_id is None:
                    raise InvalidRequest("an input item of type `function_call_output` has no `call_id`")
                messages.append(
                    Message(
                        role="tool", content=item.output or "", tool_call_id=item.call_id, name=names.get(item.call_id)
                    )
                )
                calls_go_on = False
            case other:
                raise InvalidRequest(f"input items of type {other[:32]!r} are not supported")
        reasoning = ""
    return messages


def _message(item: InputItem, reasoning: str) -> Message:
    if item.role not in ROLES:
        known = ", ".join(f"`{role}`" for role in ROLES)
        raise InvalidRequest(f"the role of an input message must be one of {known}. Given: {str(item.role)[:32]!r}")
    thought = reasoning if reasoning and item.role == "assistant" else None
    return Message(role=item.role, content=item.content, reasoning_content=thought)


def _call(item: InputItem) -> ToolCall:
    if item.call_id is None or item.name is None:
        raise InvalidRequest("an input item of type `function_call` needs `call_id` and `name`")
    return ToolCall(id=item.call_id, type="function", function=FunctionCall(name=item.name, arguments=item.arguments))


def _with_call(message: Message, call: ToolCall) -> Message:
    return message.model_copy(update={"tool_calls": [*(message.tool_calls or ()), call]})


def _reasoning(item: InputItem) -> str:
    if isinstance(item.content, str):
        return item.content
    parts: Sequence[ContentPart] = item.content or item.summary or ()
    return "".join(part.text or "" for part in parts)


def _tool(tool: FunctionTool) -> ToolDefinition:
    if tool.type != "function":
        raise InvalidRequest(f"tools of type {tool.type[:32]!r} are not supported")
    if tool.name is None:
        raise InvalidRequest("a tool of type `function` has no `name`")
    function = FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return ToolDefinition(type="function", function=function)


def _tool_choice(choice: str | NamedFunction | None) -> str | NamedToolChoice | None:
    if not isinstance(choice, NamedFunction):
        return choice
    if choice.type != "function":
        raise InvalidRequest(f"a tool choice of type {choice.type[:32]!r} is not supported")
    if choice.name is None:
        raise InvalidRequest("a tool choice of type `function` has no `name`")
    return NamedToolChoice(type="function", function=FunctionName(name=choice.name))
