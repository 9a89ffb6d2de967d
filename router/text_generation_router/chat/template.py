"""Conversations become prompts: a model's chat template, rendered as transformers renders it.

Templates are rendered in killable workers. The template is the operator's, but the messages, tools and template arguments
are the client's, and Jinja's sandbox bounds neither time nor memory (`7 ** (messages | length * 10 ** 8)`): in this process
such a template would stop the event loop. A render takes 0.03 ms in this process and 0.06 ms in a worker.
"""

import re
from bisect import bisect
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count, takewhile
from typing import Self

import orjson

from text_generation_router.admission_queue import PendingWork
from text_generation_router.chat.conversation import Conversation, Json, Tool, join_parts, text_part
from text_generation_router.chat.parsers.channels import HARMONY_CHANNEL
from text_generation_router.chat.parsers.formats import MISTRAL_CALLS
from text_generation_router.chat.parsers.sections import KIMI_CALLS
from text_generation_router.chat.template_files import DEFAULT, TOOL_USE, ChatTemplateError, ChatTemplates
from text_generation_router.chat.template_job import TOO_LONG
from text_generation_router.errors import ContextLengthExceeded, InvalidRequest, TemplateError, Unhealthy
from text_generation_router.large_inputs import run_in_thread_if_large
from text_generation_router.request import DEFAULT_TENANT, TenantId
from text_generation_router.sandbox.pool import Sandbox, SandboxBroken, SandboxError, SandboxOutOfMemory, SandboxTimeout

MEMORY_BYTES = 256 << 20
"""Heap of a worker. It needs about 15 MB, and a few times the size of the rendered text."""
MAX_CHARACTERS = 2_000_000
"""Characters of a rendered text."""
MAX_BYTES_PER_CHARACTER = 4
"""UTF-8 bytes of a character."""
MAX_INPUT_BYTES = MAX_BYTES_PER_CHARACTER * MAX_CHARACTERS
"""Bytes of messages, tools and template arguments as JSON."""
MAX_KEY_BYTES, MAX_SHORT_CHATS = 1024, 64
"""Bytes of template arguments with which short chats are rendered, and the number of those whose endings are kept."""
OWN_TEXT = "¿?"
"""Stands in a short chat for texts that each chat has of its own."""
QUESTION: Json = {"role": "user", "content": OWN_TEXT}
NEXT_QUESTION: list[Json] = [{"role": "assistant", "content": "!"}, {"role": "user", "content": "?"}]
"""The next turn of a chat: an answer and a further question."""
CALL: Json = {"id": "000000000", "type": "function", "function": {"name": "f", "arguments": {}}}
"""Templates of Mistral refuse ids of another form."""
CALL_RESULT: list[Json] = [
    {"role": "assistant", "content": "", "reasoning_content": OWN_TEXT, "tool_calls": [CALL]},
    {"role": "tool", "content": "!", "tool_call_id": CALL["id"], "name": "f"},
]
"""The other next turn, in a chat with tools: a call and its result."""
MAX_INLINE_MESSAGES = 256
"""Messages of a conversation whose input is made on the event loop: a millisecond."""

DEFAULT_TOOL_PROMPT = (
    "\nGiven the functions available, please respond with a JSON for a function call with its proper arguments that best"
    " answers the given prompt. Respond in the format {name: function name, parameters: dictionary of argument name and"
    " its value}.Do not use variables.\n"
)
"""TGI's text."""

RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
"""Variables that a request sets by other fields."""
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; templates read the first one, that of gpt-oss the second."""


class TemplateRenderer:
    """Renders a model's chat templates in its own workers."""

    def __init__(
        self,
        templates: ChatTemplates,
        *,
        workers: int = 2,
        timeout_s: float = 2.0,
        stage: PendingWork | None = None,
    ) -> None:
        """With two workers, a conversation that takes all of its time does not delay the others."""
        self._templates = templates
        sources = {name: templates.sources[name] for name in (DEFAULT, TOOL_USE) if name in templates.sources}
        self._sandbox = Sandbox(
            "text_generation_router.chat.template_job:renderer",
            {"sources": sources, "max_characters": MAX_CHARACTERS},
            workers=workers,
            timeout_s=timeout_s,
            memory_bytes=MEMORY_BYTES,
            max_output=MAX_BYTES_PER_CHARACTER * MAX_CHARACTERS,
            stage=stage,
        )
        self._without_templates = not sources
        self._short_chats: dict[bytes, str | None] = {}
        """The unrepeated endings of short chats, by all that they depend on; None: the template refuses such a chat."""

    async def __aenter__(self) -> Self:
        """Start the workers, which compile the templates. Calls wait for them."""
        if not self._without_templates:
            await self._sandbox.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the workers; unfinished renderings fail."""
        await self._sandbox.close()

    async def ready(self) -> None:
        """Wait until the workers have compiled the templates. Raises ChatTemplateError."""
        if self._without_templates:
            return
        try:
            await self._sandbox.ready()
        except SandboxError as error:
            raise ChatTemplateError(f"the chat templates cannot be compiled: {error}") from error

    async def render(self, conversation: Conversation, tenant: TenantId = DEFAULT_TENANT) -> str:
        """Return the prompt. Raises TemplateError, InvalidRequest, Overloaded, CannotKeepUp, Unhealthy; as `template_input` does."""
        large = len(conversation.messages) > MAX_INLINE_MESSAGES
        payload, trim = await run_in_thread_if_large(lambda: template_input(conversation, self._templates), large=large)
        try:
            text = (await self._sandbox.call(payload, tenant)).decode()
        except SandboxTimeout as error:
            raise TemplateError("the template took too long") from error
        except SandboxOutOfMemory as error:
            raise TemplateError("the template needs too much memory") from error
        except SandboxBroken as error:
            raise Unhealthy("chat templates cannot be rendered now") from error
        except SandboxError as error:
            if str(error).startswith(TOO_LONG):
                raise _too_long(f"{MAX_CHARACTERS} characters as a text") from error
            raise TemplateError(str(error)) from error
        return text.rstrip() if trim else text

    async def unrepeated_endings(self, conversation: Conversation, text: str, tenant: TenantId) -> set[str]:
        """Return the endings of a prompt `text` that its next turn does not repeat, such as the start of the reasoning.

        There is one for each kind of next turn, unless it is not known.
        """
        turns = (NEXT_QUESTION, CALL_RESULT) if conversation.tools else (NEXT_QUESTION,)
        endings = [await self._ending(conversation, text, turn, tenant) for turn in turns]
        return {ending for ending in endings if ending is not None}

    async def _ending(self, conversation: Conversation, text: str, turn: list[Json], tenant: TenantId) -> str | None:
        """Return the ending that a next `turn` does not repeat; None if it is not known.

        A short chat has the same, unless the ending has text of the chat's own: the template moves the system message or the tools
        into the last question, or drops the reasoning before it. The latter matters only after the first call since a question: the
        checkpoint that is left then, before this reasoning, stays during later calls.
        """
        messages = conversation.messages
        system = messages[:1] if messages[0].get("role") == "system" else []
        since = [*takewhile(lambda role: role != "user", (message.get("role") for message in reversed(messages)))]
        first_call = CALL_RESULT if since[:1] == ["tool"] and since.count("assistant") == 1 else []
        form = bool(system), bool(conversation.tools), turn is CALL_RESULT, bool(first_call)
        key = orjson.dumps([conversation.template_kwargs, *form])
        if key not in self._short_chats and len(key) <= MAX_KEY_BYTES:
            short = replace(conversation, messages=[*system, QUESTION, *first_call], continue_final_message=False)
            ending = None
            try:
                ending = await self._compared(short, await self.render(short, tenant), turn, tenant)
            except TemplateError as error:
                if isinstance(error.__cause__, (SandboxTimeout, SandboxOutOfMemory)):
                    return None  # due to its system message or its tools, which others do not have
            if len(self._short_chats) == MAX_SHORT_CHATS:
                self._short_chats.clear()
            self._short_chats[key] = ending
        ending = self._short_chats.get(key)
        if ending is None or OWN_TEXT not in ending:
            return ending
        with suppress(TemplateError):
            return await self._compared(conversation, text, turn, tenant)
        return None

    async def _compared(self, conversation: Conversation, text: str, turn: list[Json], tenant: TenantId) -> str:
        """Render the prompt of a next `turn`; return the ending of the prompt `text` that it does not repeat."""
        later = replace(conversation, messages=[*conversation.messages, *turn])
        longer = await self.render(later, tenant)
        # os.path.commonprefix would hold the event loop for 60 ms a million characters; this takes 2.
        return text[bisect(range(1, len(text) + 1), 0, key=lambda count: not longer.startswith(text[:count])) :]


def _too_long(limit: str) -> InvalidRequest:
    """Return the error for a conversation above `limit`. Clients find it by its code or its words, then they shorten it."""
    text = f"prompt is too long: messages and tools must have at most {limit}"
    return InvalidRequest(text, code=ContextLengthExceeded.openai_code)


def template_input(conversation: Conversation, templates: ChatTemplates) -> tuple[bytes, bool]:
    """Choose the template and its variables, with all tools of `conversation`, also if the tool choice excludes them.

    Return the input of the worker's job, and True if whitespace at the end of the text is to be removed, as TGI does where it
    continues the final message unasked.
    Raises TemplateError; InvalidRequest for no messages and for reserved template arguments.
    """
    if not conversation.messages:
        raise InvalidRequest("`messages` cannot be empty")
    if taken := sorted(RESERVED & conversation.template_kwargs.keys()):
        raise InvalidRequest(f"`chat_template_kwargs` must not set `{taken[0]}`")
    tools = conversation.tools
    name = templates.choose(tools_given=bool(tools))
    if name is None:
        raise TemplateError("template not found")
    messages = [plain_message(message) for message in conversation.messages]
    continue_final = _continues(conversation, messages[-1])
    knows_tools = name in templates.using_tools
    source = templates.sources[name]
    reads_description = "description" in source
    if HARMONY_CHANNEL in source:
        messages = [_with_one_text(message) for message in messages]
    messages = _with_own_ids(messages, source)
    if tools:
        appendix = tool_appendix(tools, conversation.tool_prompt, knows_tools=knows_tools)
        _append(messages[:-1] if continue_final else messages, appendix)
    if name in templates.reading_parts:
        messages = [_in_parts(message) for message in messages]
    variables: Json = {
        "documents": None,
        **templates.special_tokens,
        **conversation.template_kwargs,
        "messages": messages,
        "tools": [template_tool(tool, described=reads_description) for tool in tools]
        if tools and knows_tools
        else None,
        "add_generation_prompt": conversation.add_generation_prompt and not continue_final,
    }
    try:
        payload = orjson.dumps({"template": name, "variables": variables, "continue_final": continue_final})
    except orjson.JSONEncodeError as error:
        raise TemplateError(f"the messages cannot be passed to the template: {error}") from error
    if len(payload) > MAX_INPUT_BYTES:
        raise _too_long(f"{MAX_INPUT_BYTES} bytes as JSON")
    return payload, continue_final and conversation.continue_final_message is None


def tool_appendix(tools: Sequence[Tool], tool_prompt: str | None, *, knows_tools: bool) -> str:
    """Return the text about the tools after the user's first message, in TGI's words; may be empty.

    A template that knows tools describes itself how to call them. TGI appends its prompt even then; here it is appended
    only if the request has one.
    """
    if knows_tools:
        return f"\n---\n{tool_prompt}" if tool_prompt else ""
    listed = orjson.dumps([_tgi_tool(tool) for tool in tools]).decode()
    return f"\n---\n{listed}\n{tool_prompt or DEFAULT_TOOL_PROMPT}"


def template_tool(tool: Tool, *, described: bool = False) -> Json:
    """Return a tool in the form of templates. Without parameters it gets an empty object schema: templates read it.

    `described`: without a description it gets an empty one: the templates of gpt-oss, Hermes and Apertus read it unasked.
    """
    function: Json = {"name": tool.name}
    if tool.description is not None or described:
        function["description"] = tool.description or ""
    function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def plain_message(message: Json) -> Json:
    """Return a message as transformers passes it: without keys that are None, the texts of a content joined, and images without
    their data."""
    plain = {key: value for key, value in message.items() if value is not None}
    if isinstance(parts := plain.get("content"), list):
        plain["content"] = join_parts([_image_or_text(part) for part in parts])
    reasoning = next((plain[key] for key in REASONING_FIELDS if key in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _with_one_text(message: Json) -> Json:
    """Return a message without text beside its reasoning if it has calls: the template of gpt-oss refuses both."""
    if not (message.get("tool_calls") and message.get("content") and message.get("thinking")):
        return message
    thought = f"{message['thinking']}\n{message['content']}"
    return {**message, "content": "", "thinking": thought, "reasoning_content": thought}


def _with_own_ids(messages: list[Json], source: str) -> list[Json]:
    """Return messages whose calls have the ids that the template `source` asks for.

    Those of Mistral refuse all but nine letters or digits; that of Kimi K2 writes the id in place of the name.
    """
    is_kimi = KIMI_CALLS in source
    if not is_kimi and MISTRAL_CALLS not in source:
        return messages
    ids: dict[str, str] = {}
    numbers = count()
    renamed = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            kimi = f"functions.{call['function']['name']}:{next(numbers)}"
            own = kimi if is_kimi else re.sub("[^a-zA-Z0-9]", "", call["id"])[-9:].rjust(9, "0")
            ids[call["id"]] = own
            calls.append({**call, "id": own})
        if calls:
            message = {**message, "tool_calls": calls}
        if (answered := message.get("tool_call_id")) in ids:
            message = {**message, "tool_call_id": ids[answered]}
        renamed.append(message)
    return renamed


def _in_parts(message: Json) -> Json:
    """Return a message whose content is a list."""
    content = message.get("content")
    return message | {"content": [text_part(content)]} if isinstance(content, str) else message


def _image_or_text(part: object) -> str | Json:
    if isinstance(part, dict) and "image" in part:
        return {"type": "image"}
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str):
        raise TemplateError("only text parts are supported in messages")
    return text


def _tgi_tool(tool: Tool) -> Json:
    arguments = orjson.dumps(tool.parameters).decode()
    return {
        "type": "function",
        "function": {"description": tool.description, "name": tool.name, "arguments": arguments},
    }


def _continues(conversation: Conversation, final: Json) -> bool:
    if conversation.continue_final_message is None:
        return final.get("role") == "assistant" and not final.get("tool_calls") and "content" in final
    if conversation.continue_final_message and "content" not in final:
        raise TemplateError("the final message has no content that could be continued")
    return conversation.continue_final_message


def _append(messages: Sequence[Json], appendix: str) -> None:
    """Append to the first message of the user, else to the last message that has a text.

    TGI appends to the last one. There the text about the tools would move with every turn, and never be found in the
    prefix cache.
    """
    with_text = [message for message in messages if "content" in message]
    of_user = [message for message in with_text if message.get("role") == "user"]
    for message in of_user[:1] or with_text[-1:]:
        content = message["content"]
        message["content"] = join_parts([*content, appendix]) if isinstance(content, list) else content + appendix
