"""Bodies of chats and completions as conversations and options, in all the variants that clients send."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from text_generation_proto.parameters import Api
from text_generation_proto.values import Grammar, LogprobOptions
from text_generation_router.api.core.chat import read_tool, tool_call
from text_generation_router.api.core.parameters import GenerationOptions, open_sampling
from text_generation_router.api.openai.schemas import (
    AllowedToolsChoice,
    ChatBody,
    CompletionBody,
    ContentPart,
    FunctionDefinition,
    Message,
    NamedToolChoice,
    OpenAIBody,
)
from text_generation_router.chat.conversation import (
    Conversation,
    Json,
    Tool,
    ToolChoice,
    ToolMode,
    image_part,
    join_parts,
    without_billing,
)
from text_generation_router.errors import InvalidRequest, NotSupported
from text_generation_router.grammar.forms import guided, response_format
from text_generation_router.request import TokenId
from text_generation_router.web.bodies import pop_each
from text_generation_router.web.body_errors import about
from text_generation_router.web.structure import JsonTexts

_ROLES = {"developer": "system", "function": "tool"}
"""OpenAI roles with another name in chat templates."""


def chat_options(body: ChatBody) -> GenerationOptions:
    """Return the options of a chat; as in TGI, `top_logprobs` counts without `logprobs` too. Raises InvalidRequest."""
    is_new = body.max_completion_tokens is not None
    max_tokens = body.max_completion_tokens if is_new else body.max_tokens
    top_n = body.top_logprobs or 0
    options = _options(body, Api.CHAT, max_tokens, LogprobOptions(top_n, tokens=bool(body.logprobs) or top_n > 0))
    if body.prediction is not None:
        options = replace(options, prediction=body.prediction.text)
    return replace(options, length_field="max_completion_tokens") if is_new else options


def completion_options(body: CompletionBody) -> GenerationOptions:
    """Return the options of a completion. Raises InvalidRequest.

    `max_tokens` of 0 with `echo` generates one token that the answer leaves out.
    """
    top_n = body.logprobs or 0
    scored = body.logprobs is not None
    logprobs = LogprobOptions(
        top_n, prompt=bool(body.echo) and scored, prompt_top_n=top_n if body.echo else 0, tokens=scored
    )
    max_tokens = 1 if body.max_tokens == 0 and body.echo else body.max_tokens
    grammar = asked_grammar(body)
    options = _options(body, Api.COMPLETIONS, max_tokens, logprobs)
    return replace(options, add_special_tokens=body.add_special_tokens is not False, grammar=grammar)


def asked_grammar(body: OpenAIBody) -> Grammar | None:
    """Return the grammar of the answer. Raises InvalidRequest."""
    with about("response_format"):
        form = None if body.response_format is None else response_format(body.response_format)
    with about(body.grammar_field):
        other = guided(body.constraints)
    if form is not None and other is not None:
        raise InvalidRequest("`response_format` and another constraint cannot be combined")
    return form or other


def _options(body: OpenAIBody, api: Api, max_tokens: int | None, logprobs: LogprobOptions) -> GenerationOptions:
    if body.prompt_logprobs is not None:
        if body.stream:
            raise NotSupported("`prompt_logprobs` is not supported with `stream`")
        most = max(logprobs.prompt_top_n, body.prompt_logprobs)
        logprobs = replace(logprobs, prompt=True, prompt_top_n=most)
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return GenerationOptions(
        api=api,
        sampling=open_sampling(body, api, _logit_bias(body), body.allowed_token_ids),
        max_new_tokens=max_tokens,
        length_field="max_tokens",
        min_new_tokens=body.min_tokens or 0,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        bad_words=tuple(body.bad_words or ()),
        ignore_eos=bool(body.ignore_eos),
        stop_sequences=tuple(text for text in stop if text),
        keep_stop_text=bool(body.include_stop_str_in_output or body.no_stop_trim),
        truncate=body.truncate_prompt_tokens,
        logprobs=logprobs,
        grammar_field=body.grammar_field,
    )


def _logit_bias(body: OpenAIBody) -> dict[TokenId, float]:
    if not isinstance(body.logit_bias, dict):
        return {}
    biases: dict[TokenId, float] = {}
    for token_id, bias in body.logit_bias.items():
        if not (token_id.isascii() and token_id.isdecimal()):
            raise InvalidRequest("`logit_bias` keys must be token ids")
        biases[int(token_id)] = bias
    return biases


def to_conversation(body: ChatBody, grammar: Grammar | None) -> Conversation:
    """Return the conversation of a body; `grammar` is that of its response format. Raises InvalidRequest."""
    texts = JsonTexts()
    with about("messages"):
        messages = [_message(message, texts) for message in pop_each(body.messages)]
    with about("tools"):
        tools = [_tool(tool.type, tool.function, texts) for tool in body.tools or ()]
        tools += [_tool("function", function, texts) for function in body.functions or ()]
    kwargs = dict(body.chat_template_kwargs or {})
    for name, value in (
        ("reasoning_effort", body.reasoning_effort),
        ("verbosity", body.verbosity),
        ("documents", body.documents),
    ):
        if value is not None:
            kwargs.setdefault(name, value)
    return Conversation(
        messages=messages,
        tools=tools,
        tool_choice=_choice(body),
        tool_prompt=body.tool_prompt or None,
        parallel_tool_calls=body.parallel_tool_calls is not False and not body.functions,
        grammar=grammar,
        continue_final_message=body.continue_final_message,
        add_generation_prompt=body.add_generation_prompt is not False,
        template_kwargs=kwargs,
    )


def new_message(role: str, content: str | Sequence[ContentPart] | None) -> Json:
    """Return a message of templates. Raises InvalidRequest for a part that is neither text nor an image."""
    role = _ROLES.get(role, role)
    return {"role": role, "content": _content(content, role)}


def _message(message: Message, texts: JsonTexts) -> Json:
    flat = new_message(message.role, message.content)
    if message.tool_calls:
        flat["tool_calls"] = [
            tool_call(
                str(call.id) if call.id is not None else "",
                call.function.name,
                read_arguments(call.function.arguments, texts),
            )
            for call in message.tool_calls
        ]
    if message.function_call is not None and not message.tool_calls:
        flat["tool_calls"] = [
            tool_call("", message.function_call.name, read_arguments(message.function_call.arguments, texts))
        ]
    for key, value in (
        ("name", message.name),
        ("tool_call_id", message.tool_call_id),
        ("reasoning_content", message.reasoning_content),
    ):
        if value is not None:
            flat[key] = value
    return flat


def _content(content: str | Sequence[ContentPart] | None, role: str) -> str | list[Json]:
    if content is None or isinstance(content, str):
        return without_billing(content or "") if role == "system" else content or ""
    parts: list[str | Json] = [_part(part, role) for part in content]
    if role == "system":
        parts = [without_billing(part) if isinstance(part, str) else part for part in parts]
    return join_parts(parts)


def _part(part: ContentPart, role: str) -> str | Json:
    if part.type in ("image_url", "input_image") and role in ("user", "tool"):
        source = part.image_url if isinstance(part.image_url, str | None) else part.image_url.url
        if not source:
            said = f"a content part of type `{part.type}` has no `image_url`"
            raise InvalidRequest(said, code="missing_required_parameter")
        return image_part(source)
    if part.type not in ("text", "input_text", "output_text", "refusal"):
        said = f"{part.type.removesuffix('_url')[:32]} modality is not supported in messages of role `{role[:32]}`"
        raise InvalidRequest(said, code="unsupported_value")
    if part.text is None and part.type != "refusal":
        said = f"a content part of type `{part.type}` has no `text`"
        raise InvalidRequest(said, code="missing_required_parameter")
    return part.text or ""


def read_arguments(arguments: str | dict[str, Any] | None, texts: JsonTexts) -> Any:  # noqa: ANN401 - any JSON that the model wrote
    """Return the arguments as an object, which templates serialize; an empty one for no text and for null.

    Text that cannot be read as JSON stays text.
    """
    if not arguments or not isinstance(arguments, str):
        return arguments or {}
    try:
        return texts.read(arguments) or {}
    except ValueError:
        return arguments


def _choice(body: ChatBody) -> ToolChoice:
    """Return the tool choice, of tools or of functions. Raises InvalidRequest."""
    if body.tools and body.functions:
        raise InvalidRequest("`tools` and `functions` cannot be combined")
    call = body.function_call
    if call is None:
        return _tool_choice(body.tool_choice)
    choice = _tool_choice(call) if isinstance(call, str) else ToolChoice(ToolMode.NAMED, call.name)
    if body.functions:
        return replace(choice, field="function_call")
    if choice.name:
        raise InvalidRequest(f"`function_call` names the function {choice.name[:64]!r}, but there are no `functions`")
    return _tool_choice(body.tool_choice)


def _tool(kind: str, function: FunctionDefinition, texts: JsonTexts) -> Tool:
    if kind != "function":
        raise InvalidRequest(f"tools of type {kind[:32]!r} are not supported", code="unsupported_value")
    parameters = function.arguments if function.parameters is None else function.parameters
    if isinstance(parameters, str):
        try:
            parameters = texts.read(parameters)
        except ValueError as error:
            raise InvalidRequest(f"the parameters of tool {function.name!r} are not JSON: {error}") from None
        if not isinstance(parameters, dict):
            raise InvalidRequest(f"the parameters of tool {function.name!r} are not an object")
    return read_tool(function.name, function.description, parameters, strict=bool(function.strict))


def _tool_choice(choice: str | AllowedToolsChoice | NamedToolChoice | None) -> ToolChoice:
    """Return the tool choice. As in TGI, an unknown word is the name of the function to call."""
    if choice is None:
        return ToolChoice()
    if isinstance(choice, AllowedToolsChoice):
        allowed = choice.allowed_tools
        return ToolChoice(ToolMode(allowed.mode), allowed=frozenset(tool.function.name for tool in allowed.tools))
    if isinstance(choice, NamedToolChoice):
        return ToolChoice(ToolMode.NAMED, choice.function.name)
    try:
        mode = ToolMode(choice)
    except ValueError:
        return ToolChoice(ToolMode.NAMED, choice)
    return ToolChoice(ToolMode.NAMED, choice) if mode is ToolMode.NAMED else ToolChoice(mode)
