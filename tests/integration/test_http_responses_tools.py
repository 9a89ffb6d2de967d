"""POST /v1/responses as a coding agent sends it: functions, a namespace of functions, and a hosted search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from http_stack import serve
from openai import AsyncOpenAI
from openai.types.responses import Response

SAYS = '<tool_call>\n{"name": "send_input", "arguments": {"target": "a1"}}\n</tool_call>'
TEMPLATE = (
    "{% if messages|length == 1 %}{{ messages[0].content }}{% else %}"
    "{% for m in messages %}[{{ m.role }}]{% for c in m.tool_calls %}({{ c.function.name }} "
    "{{ c.function.arguments.target }}){% endfor %}{{ m.name }}{% endfor %}"
    "{% for t in tools %}<{{ t.function.name }}>{% endfor %}{% endif %}"
)
"""The echo engine repeats the prompt: the calls that the user writes, then their output."""
TARGET = {"type": "object", "properties": {"target": {"type": "string"}}, "required": ["target"]}
TOOLS: list[Any] = [
    {"type": "function", "name": "send_input", "description": "To a process.", "strict": False, "parameters": TARGET},
    {
        "type": "namespace",
        "name": "multi_agent_v1",
        "description": "Tools for sub-agents.",
        "tools": [
            {"type": "function", "name": "close_agent", "description": "Close.", "strict": False, "parameters": TARGET},
            {"type": "function", "name": "send_input", "description": "Send.", "strict": False, "parameters": TARGET},
        ],
    },
    {"type": "web_search", "external_web_access": False},
]


async def test_a_call_of_a_namespaces_function_goes_round(demo_model: Path) -> None:
    says = SAYS.replace("send_input", "multi_agent_v1__send_input")
    async with serve(demo_model, chat_template=TEMPLATE, tool_call_parser="hermes", grammars=True) as stack:
        url = f"http://127.0.0.1:{stack.port}/v1"
        asked: dict[str, Any] = {"model": "m", "tools": TOOLS, "tool_choice": "auto", "temperature": 0, "store": False}
        length = len(await stack.tokenizer.encode_ids(says, add_special_tokens=False))
        async with AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
            question: Any = {"role": "user", "content": says}
            whole = await client.responses.create(**asked, input=[question], max_output_tokens=length)
            async with client.responses.stream(**asked, input=[question], max_output_tokens=length) as stream:
                events = [event async for event in stream]
            raw = await client.responses.with_raw_response.create(**asked, input=[question], max_output_tokens=length)
            [call] = whole.output
            result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sent"}
            after = await client.responses.create(
                **asked, input=[question, *whole.output, result], max_output_tokens=60
            )
    Response.model_validate(whole.model_dump(by_alias=True))
    assert json.loads(raw.text)["tools"] == TOOLS
    final = events[-1].response
    added_and_done = [
        event.item for event in events if event.type in ("response.output_item.added", "response.output_item.done")
    ]
    assert len(added_and_done) == 2
    for one in (call, *final.output, *added_and_done):
        assert (one.type, one.name, one.namespace) == ("function_call", "send_input", "multi_agent_v1")
    assert json.loads(call.arguments) == json.loads(final.output[0].arguments) == {"target": "a1"}
    assert after.output_text.startswith(
        "[user][assistant](multi_agent_v1__send_input a1)[tool]multi_agent_v1__send_input"
        "<send_input><close_agent><multi_agent_v1__send_input>"
    )
