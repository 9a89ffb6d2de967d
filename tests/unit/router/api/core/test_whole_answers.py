"""Whole answers: large ones of chats are parsed in pieces, and the best of several is found."""

from __future__ import annotations

import asyncio
import json
import math

import pytest

from text_generation_proto.values import FinishReason
from text_generation_router.api.core.chat import AnswerForm, ChatRequest
from text_generation_router.api.core.serving import Collector
from text_generation_router.generation import GenerationResult, TokenOutput
from text_generation_router.request import Request, RequestId

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


def collected(*logprobs: bytes) -> Collector:
    collector = Collector(Request(RequestId(1), (1,), max_new_tokens=9), most_logprobs=9)
    for logprob in logprobs:
        collector.on_output(TokenOutput(1, 7, "a", "a", logprob, special=False, top=(), ending=None))
    return collector


async def test_tokens_with_an_unknown_logprob_do_not_count() -> None:
    assert collected(b"-0.5", b"null", b"-1.5", b"null").mean_logprob == pytest.approx(-1.0)
    ends_unknown, worse = collected(b"-0.25", b"null"), collected(b"-0.5", b"-0.5")
    assert max((worse, ends_unknown), key=lambda collector: collector.mean_logprob) is ends_unknown


async def test_a_sequence_without_a_known_logprob_ranks_last() -> None:
    assert collected(b"null", b"null").mean_logprob == -math.inf
