"""What a chat template is given: a conversation in the shape that templates know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from text_generation_router.chat.conversation import Conversation, Json, Tool
from text_generation_router.chat.template_files import ChatTemplates
from text_generation_router.errors import InvalidRequest, TemplateError

DEFAULT_TOOL_PROMPT = (
    "\nGiven the functions available, please respond with a JSON for a function call with its proper arguments that best"
    " answers the given prompt. Respond in the format {name: function name, parameters: dictionary of argument name and"
    " its value}.Do not use variables.\n"
)
"""TGI's, to the letter."""

RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
"""Variables that a request sets by fields of its own."""
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which a message's reasoning comes; templates read the first, gpt-oss's the second."""


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """One rendering."""

    template: str
    """Its name."""
    variables: Mapping[str, Any]
    continue_final: bool
    """Cut the text behind the final message's content."""
    trim: bool
    """Remove white space at the end of what was cut, as TGI does where nobody asked to continue."""

    def to_json(self) -> bytes:
        """For the worker. Raises TemplateError."""
        request = {"template": self.template, "variables": self.variables, "continue_final": self.continue_final}
        try:
            return orjson.dumps(request)
        except orjson.JSONEncodeError as error:
            raise TemplateError(f"the messages cannot be passed to the template: {error}") from error


def template_input(conversation: Conversation, templates: ChatTemplates) -> TemplateInput:
    """Choose the template and its variables. The model hears of all tools of `conversation`, whatever their choice.

    Raises TemplateError, and InvalidRequest for no messages and for reserved template arguments.
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
    if tools:
        appendix = tool_appendix(tools, conversation.tool_prompt, knows_tools=knows_tools)
        _append(messages[:-1] if continue_final else messages, appendix)
    variables: Json = {
        "documents": None,
        **templates.special_tokens,
        **conversation.template_kwargs,
        "messages": messages,
        "tools": [template_tool(tool) for tool in tools] if tools and knows_tools else None,
        "add_generation_prompt": conversation.add_generation_prompt and not continue_final,
    }
    return TemplateInput(
        name, variables, continue_final, trim=continue_final and conversation.continue_final_message is None
    )


def tool_appendix(tools: Sequence[Tool], tool_prompt: str | None, *, knows_tools: bool) -> str:
    """What is written behind the last message because of the tools, as in TGI; empty for nothing.

    A template that knows tools says by itself how to call them. There TGI appends its prompt all the same; here it is
    appended only if the request brings one.
    """
    if knows_tools:
        return f"\n---\n{tool_prompt}" if tool_prompt else ""
    listed = orjson.dumps([_tgi_tool(tool) for tool in tools]).decode()
    return f"\n---\n{listed}\n{tool_prompt or DEFAULT_TOOL_PROMPT}"


def template_tool(tool: Tool) -> Json:
    """A tool as templates know it. A function without parameters has an empty object of them: templates look inside."""
    function: Json = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def plain_message(message: Json) -> Json:
    """A message as transformers passes it: without keys that are None; parts of a content joined to one text."""
    plain = {key: value for key, value in message.items() if value is not None}
    if isinstance(plain.get("content"), list):
        plain["content"] = "".join(_text(part) for part in plain["content"])
    reasoning = next((plain[key] for key in REASONING_FIELDS if key in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _text(part: object) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str):
        raise TemplateError("a message has a part that is no text")
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
    """Behind the last message that has a text."""
    for message in reversed(messages):
        if "content" in message:
            message["content"] += appendix
            return
