"""A Messages body in the words of OpenAI's chats, where a tool's result is a message and not a part of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from text_generation_router.api.anthropic.schemas import (
    ClientTool,
    ContentBlock,
    CountTokensBody,
    InputMessage,
    MessagesBody,
    TextBlock,
    ToolChoice,
)
from text_generation_router.api.openai.one_answer import Asked
from text_generation_router.api.openai.schemas import (
    ChatBody,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    Message,
    NamedToolChoice,
    ToolCall,
    ToolDefinition,
)
from text_generation_router.errors import InvalidRequest, ThreadNotSupported
from text_generation_router.grammar.forms import response_format

ROLES = ("user", "assistant", "system")
BETWEEN_TEXTS = "\n"
"""Between two texts of one message, which are blocks because they are paragraphs."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def to_asked(body: CountTokensBody) -> Asked:
    """What a body asks for. Raises InvalidRequest for what cannot be done, by name."""
    if body.thread is not None:
        raise ThreadNotSupported
    if not body.messages:
        raise InvalidRequest("`messages` cannot be empty")
    messages = [Message(role="system", content=_text(body.system))] if body.system else []
    names: dict[str, str] = {}
    for message in body.messages:
        messages.extend(_messages(message, names))
    if not messages:
        raise InvalidRequest("`messages` have no content")
    final = messages[-1]
    config = body.output_config
    # Built from values that were validated already.
    chat = ChatBody.model_construct(
        messages=messages,
        tools=[_tool(tool) for tool in body.tools or ()],
        tool_choice=None if body.tool_choice is None else _tool_choice(body.tool_choice),
        parallel_tool_calls=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        # To the letter: nothing is trimmed, nothing added.
        continue_final_message=final.role == "assistant" and not final.tool_calls,
        chat_template_kwargs=None if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"},
        reasoning_effort=None if config is None else config.effort,
    )
    if isinstance(body, MessagesBody):
        chat = chat.model_copy(
            update={
                "max_tokens": body.max_tokens,
                "stop": body.stop_sequences,
                "temperature": body.temperature,
                "top_p": body.top_p,
                "top_k": body.top_k,
            }
        )
    form = None if config is None else config.format
    return Asked(chat, None if form is None else response_format(form))


def _messages(message: InputMessage, names: dict[str, str]) -> Iterator[Message]:
    """The messages that one is; `names` are the tools by the ids of their uses so far, for the results."""
    if message.role not in ROLES:
        known = ", ".join(f"`{role}`" for role in ROLES)
        raise InvalidRequest(f"the role of a message must be one of {known}. Given: {message.role[:32]!r}")
    if isinstance(message.content, str):
        yield Message(role=message.role, content=message.content)
    elif message.role == "assistant":
        yield _said(message.content, names)
    else:
        yield from _asked(message.role, message.content, names)


def _asked(role: str, blocks: Sequence[ContentBlock], names: dict[str, str]) -> Iterator[Message]:
    """Texts and tools' results, in their order."""
    texts: list[str] = []
    for block in blocks:
        match block.type:
            case "text":
                texts.append(block.text or "")
            case "tool_result":
                if texts:
                    yield Message(role=role, content=BETWEEN_TEXTS.join(texts))
                    texts = []
                yield _result(block, names)
            case _:
                raise _not_supported(role, block.type)
    if texts:
        yield Message(role=role, content=BETWEEN_TEXTS.join(texts))


def _said(blocks: Sequence[ContentBlock], names: dict[str, str]) -> Message:
    """What the assistant thought, said and called."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in blocks:
        match block.type:
            case "text":
                texts.append(block.text or "")
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass
            case "tool_use":
                if block.id is None or block.name is None:
                    raise InvalidRequest("a block of type `tool_use` needs `id` and `name`")
                names[block.id] = block.name
                calls.append(
                    ToolCall(
                        id=block.id,
                        type="function",
                        function=FunctionCall(name=block.name, arguments=block.input or {}),
                    )
                )
            case _:
                raise _not_supported("assistant", block.type)
    return Message(
        role="assistant",
        content=BETWEEN_TEXTS.join(texts),
        tool_calls=calls or None,
        reasoning_content=BETWEEN_TEXTS.join(thoughts) or None,
    )


def _result(block: ContentBlock, names: dict[str, str]) -> Message:
    if block.tool_use_id is None:
        raise InvalidRequest("a block of type `tool_result` has no `tool_use_id`")
    text = _text(block.content)
    if block.is_error:
        text = f"Error: {text}"  # templates have no other place for it
    return Message(role="tool", content=text, tool_call_id=block.tool_use_id, name=names.get(block.tool_use_id))


def _text(content: str | Sequence[TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for block in content:
        if block.type != "text":
            raise InvalidRequest(f"blocks of type {block.type[:32]!r} are not supported")
    return BETWEEN_TEXTS.join(block.text or "" for block in content)


def _not_supported(role: str, kind: str) -> InvalidRequest:
    return InvalidRequest(f"blocks of type {kind[:32]!r} are not supported in messages of role `{role}`")


def _tool(tool: ClientTool) -> ToolDefinition:
    if tool.type not in (None, "custom"):
        raise InvalidRequest(f"tools of type {tool.type[:32]!r} are not supported")
    function = FunctionDefinition(name=tool.name, description=tool.description, parameters=tool.input_schema)
    return ToolDefinition(type="function", function=function)


def _tool_choice(choice: ToolChoice) -> str | NamedToolChoice:
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequest("a tool choice of type `tool` has no `name`")
        return NamedToolChoice(type="function", function=FunctionName(name=choice.name))
    if choice.type not in _CHOICES:
        raise InvalidRequest(f"a tool choice of type {choice.type[:32]!r} is not supported")
    return _CHOICES[choice.type]
