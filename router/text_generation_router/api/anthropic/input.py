"""Messages bodies as conversations and options. A tool result, here a block, becomes a message of its own."""

from collections.abc import Iterator, Sequence

from text_generation_proto.parameters import Api
from text_generation_router.api.anthropic.schemas import (
    ClientTool,
    ContentBlock,
    CountTokensBody,
    InputMessage,
    MessagesBody,
    TextBlock,
    ToolUseChoice,
)
from text_generation_router.api.core.chat import read_tool, tool_call
from text_generation_router.api.core.parameters import GenerationOptions, open_sampling
from text_generation_router.chat.conversation import (
    Conversation,
    Json,
    Tool,
    ToolChoice,
    ToolMode,
    image_part,
    join_parts,
    text_part,
    without_billing,
)
from text_generation_router.errors import InvalidRequest, ThreadNotSupported
from text_generation_router.grammar.forms import response_format
from text_generation_router.web.bodies import pop_each

ROLES = ("user", "assistant", "system")
BETWEEN_TEXTS = "\n"
"""Joins the text blocks of one message: blocks are paragraphs."""
_THINKING = ("adaptive", "disabled", "enabled")
_MODES = {"auto": ToolMode.AUTO, "any": ToolMode.REQUIRED, "none": ToolMode.NONE}


def to_options(body: MessagesBody) -> GenerationOptions:
    return GenerationOptions(
        api=Api.MESSAGES,
        sampling=open_sampling(body, Api.MESSAGES),
        max_new_tokens=body.max_tokens,
        length_field="max_tokens",
        stop_sequences=tuple(text for text in body.stop_sequences or () if text),
    )


def to_conversation(body: CountTokensBody) -> Conversation:
    """Return the conversation of a body. Raises InvalidRequest, naming what is not supported."""
    if body.thread is not None:
        raise ThreadNotSupported
    if not body.messages:
        raise InvalidRequest("`messages` cannot be empty")
    texts = [body.system or ""] if isinstance(body.system, str | None) else map(_text, body.system)
    system = BETWEEN_TEXTS.join(filter(None, map(without_billing, texts)))
    messages: list[Json] = [{"role": "system", "content": system}] if system else []
    names: dict[str, str] = {}
    for message in pop_each(body.messages):
        messages.extend(_messages(message, names))
    if not messages:
        raise InvalidRequest("`messages` have no content")
    final, choice, config = messages[-1], body.tool_choice, body.output_config
    form = body.output_format if config is None or config.format is None else config.format
    kwargs: Json = {}
    if body.thinking is not None:
        if body.thinking.type not in _THINKING:
            known = ", ".join(f"`{word}`" for word in _THINKING)
            raise InvalidRequest(f"`thinking.type` must be one of {known}. Given: {body.thinking.type[:32]!r}")
        kwargs["enable_thinking"] = body.thinking.type != "disabled"
    if config is not None and config.effort is not None:
        kwargs["reasoning_effort"] = config.effort
    return Conversation(
        messages=messages,
        tools=[_tool(tool) for tool in body.tools or ()],
        tool_choice=ToolChoice() if choice is None else _tool_choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        grammar=None if form is None else response_format(form),
        # Exactly as given: nothing is trimmed, nothing added.
        continue_final_message=final["role"] == "assistant" and "tool_calls" not in final,
        template_kwargs=kwargs,
    )


def _messages(message: InputMessage, names: dict[str, str]) -> Iterator[Json]:
    """Yield the template messages of one message; `names` maps the ids of tool uses so far to tools."""
    if message.role not in ROLES:
        known = ", ".join(f"`{role}`" for role in ROLES)
        raise InvalidRequest(f"the role of a message must be one of {known}. Given: {message.role[:32]!r}")
    if isinstance(message.content, str):
        system = message.role == "system"
        yield {"role": message.role, "content": without_billing(message.content) if system else message.content}
    elif message.role == "assistant":
        yield _assistant_message(message.content, names)
    else:
        yield from _texts_and_results(message.role, message.content, names)


def _texts_and_results(role: str, blocks: Sequence[ContentBlock], names: dict[str, str]) -> Iterator[Json]:
    parts: list[str | Json] = []
    for block in blocks:
        match block.type:
            case "text":
                text = _written(block)
                parts.append(without_billing(text) if role == "system" else text)
            case "image" if role == "user":
                parts.append(_image(block))
            case "tool_result":
                if parts:
                    yield {"role": role, "content": join_parts(parts, BETWEEN_TEXTS)}
                    parts = []
                yield _result(block, names)
            case _:
                raise _not_supported(role, block.type)
    if parts:
        yield {"role": role, "content": join_parts(parts, BETWEEN_TEXTS)}


def _assistant_message(blocks: Sequence[ContentBlock], names: dict[str, str]) -> Json:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for block in blocks:
        match block.type:
            case "text":
                texts.append(_written(block))
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass
            case "tool_use":
                if block.id is None or block.name is None:
                    raise InvalidRequest("a block of type `tool_use` needs `id` and `name`")
                names[block.id] = block.name
                calls.append(tool_call(block.id, block.name, block.input or {}))
            case _:
                raise _not_supported("assistant", block.type)
    message: Json = {"role": "assistant", "content": BETWEEN_TEXTS.join(texts)}
    if calls:
        message["tool_calls"] = calls
    if reasoning := BETWEEN_TEXTS.join(thoughts):
        message["reasoning_content"] = reasoning
    return message


def _result(block: ContentBlock, names: dict[str, str]) -> Json:
    if block.tool_use_id is None:
        raise InvalidRequest("a block of type `tool_result` has no `tool_use_id`")
    given = [block.content or ""] if isinstance(block.content, str | None) else block.content
    parts = [each if isinstance(each, str) else (_image if each.type == "image" else _text)(each) for each in given]
    content = join_parts(parts, BETWEEN_TEXTS)
    if block.is_error:  # templates have no other place for it
        content = f"Error: {content}" if isinstance(content, str) else [text_part("Error: "), *content]
    message: Json = {"role": "tool", "content": content}
    if block.tool_use_id in names:
        message["name"] = names[block.tool_use_id]
    return message | {"tool_call_id": block.tool_use_id}


def _text(block: TextBlock) -> str:
    if block.type != "text":
        raise InvalidRequest(f"blocks of type {block.type[:32]!r} are not supported")
    return _written(block)


def _image(block: TextBlock | ContentBlock) -> Json:
    source = block.source
    if source is not None and source.type == "base64" and source.data:
        return image_part(f"data:{source.media_type or 'image'};base64,{source.data}")
    if source is not None and source.type == "url" and source.url:
        return image_part(source.url)
    raise InvalidRequest("the `source` of an image must have `data` and the type `base64`, or `url` and the type `url`")


def _written(block: TextBlock | ContentBlock) -> str:
    if block.text is None:
        raise InvalidRequest("a block of type `text` has no `text`")
    return block.text


def _not_supported(role: str, kind: str) -> InvalidRequest:
    return InvalidRequest(f"blocks of type {kind[:32]!r} are not supported in messages of role `{role}`")


def _tool(tool: ClientTool) -> Tool:
    if tool.type not in (None, "custom"):
        raise InvalidRequest(f"tools of type {tool.type[:32]!r} are not supported")
    if tool.input_schema is None:
        raise InvalidRequest(f"the tool {tool.name!r} has no `input_schema`")
    return read_tool(tool.name, tool.description, tool.input_schema, strict=bool(tool.strict))


def _tool_choice(choice: ToolUseChoice) -> ToolChoice:
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequest("a tool choice of type `tool` has no `name`")
        return ToolChoice(ToolMode.NAMED, choice.name)
    if choice.type not in _MODES:
        raise InvalidRequest(f"a tool choice of type {choice.type[:32]!r} is not supported")
    return ToolChoice(_MODES[choice.type])
