"""Whole answers of chats: large ones are parsed in pieces."""

from __future__ import annotations

import asyncio
import json

import pytest

from text_generation_proto.values import FinishReason
from text_generation_router.api.core.chat import AnswerForm, ChatRequest
from text_generation_router.generation import GenerationResult

WRITTEN = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": %s}]',
    "json_calls": '{"name": "f", "arguments": %s}',
}


@pytest.mark.parametrize("form", WRITTEN)
async def test_other_requests_run_while_a_large_answer_is_parsed(form: str) -> None:
    arguments = json.dumps({"text": "word \n" * 30_000})
    text = WRITTEN[form] % arguments
    chat = ChatRequest((), "", AnswerForm(form, {"f": {}}))
    turns = 0
    async with asyncio.TaskGroup() as tasks:
        parsing = tasks.create_task(chat.answer(GenerationResult(FinishReason.EOS_TOKEN, text, 1)))
        while not parsing.done():
            await asyncio.sleep(0)
            turns += 1
    [call] = parsing.result().calls
    assert (call.name, json.loads(call.arguments)) == ("f", json.loads(arguments))
    assert turns > 40
