"""Completions in OpenAI's dialect, over the echo engine: new token i of an answer is token i of its prompt."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from http_stack import Stack, serve, served
from sse_client import Json, chunks, post

COMPLETIONS = "/v1/completions"

NONE_CACHED: Json = {"prompt_tokens_details": {"cached_tokens": 0}}

pytestmark = pytest.mark.asyncio(loop_scope="module")


stack = served(grammars=True)


def texts(reply: Json) -> list[str]:
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(reply["choices"])))
    return [choice["text"] for choice in reply["choices"]]


def joined(stream: list[Json]) -> list[tuple[str, str]]:
    """Text and finish reason of each choice."""
    answers: dict[int, tuple[str, str]] = {}
    for chunk in stream:
        for choice in chunk["choices"]:
            text, finish = answers.get(choice["index"], ("", None))
            assert finish is None, "a choice ends once"
            answers[choice["index"]] = (text + choice["text"], choice["finish_reason"])
    return [answers[index] for index in range(len(answers))]


async def test_a_reply_has_openais_shape(stack: Stack) -> None:
    body = {"model": "dummy", "prompt": "Hello there", "max_tokens": 3, "temperature": 0}
    _, reply, headers = await stack.ask(COMPLETIONS, body)
    assert reply.pop("id").startswith("cmpl-")
    assert reply.pop("created") > 1_700_000_000
    assert reply == {
        "object": "text_completion",
        "model": "dummy",
        "system_fingerprint": "0.0.0-native",
        "choices": [{"index": 0, "text": "Hello thereHello", "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5, **NONE_CACHED},
    }
    assert "x-compute-time" not in headers
    assert headers["x-generated-tokens"] == "3"


PROMPTS = [
    ("a text", "Hello there", ["Hello"]),
    ("texts", ["Hello there", "and you"], ["Hello", "and"]),
    ("ids", [19556, 665], ["Hello"]),
    ("lists of ids", [[19556, 665], [665]], ["Hello", " there"]),
]


@pytest.mark.parametrize(("name", "prompt", "expected"), PROMPTS, ids=[row[0] for row in PROMPTS])
async def test_a_prompt_may_be_texts_or_ids(stack: Stack, name: str, prompt: object, expected: list[str]) -> None:
    body = {"prompt": prompt, "max_tokens": 1}
    assert texts(await post(stack.client, COMPLETIONS, body)) == expected
    assert [text for text, _ in joined(await chunks(stack.client, COMPLETIONS, body))] == expected


async def test_choices_stand_in_the_order_of_their_prompts_however_they_end(stack: Stack) -> None:
    body = {"prompt": ["one two three four five six", "a"], "max_tokens": 6, "n": 2, "stop": ["six", "aaa"]}
    reply = await post(stack.client, COMPLETIONS, body)
    answers = [(choice["text"], choice["finish_reason"]) for choice in reply["choices"]]
    assert answers == [("one two three four five ", "stop")] * 2 + [("", "stop")] * 2
    assert joined(await chunks(stack.client, COMPLETIONS, body)) == answers
    assert reply["usage"] == {"prompt_tokens": 7, "completion_tokens": 18, "total_tokens": 25, **NONE_CACHED}


async def test_characters_of_token_ids_are_counted_if_they_are_decoded(stack: Stack) -> None:
    for prompt, echo, characters in (("Hello there", False, 11), ([19556, 665], False, 0), ([19556, 665], True, 11)):
        reply = await stack.ask(COMPLETIONS, {"prompt": prompt, "echo": echo, "max_tokens": 1})
        assert reply.headers["x-compute-characters"] == str(characters)
        assert reply.body["usage"]["prompt_tokens"] == 2


async def test_echo_with_logprobs_scores_the_prompt(stack: Stack) -> None:
    """Evaluation harnesses send such requests."""
    body = {"prompt": [19556, 665], "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
    [choice] = (await post(stack.client, COMPLETIONS, body))["choices"]
    assert choice["text"] == "Hello thereHello"
    assert choice["logprobs"] == {
        "tokens": ["Hello", " there", "Hello"],
        "token_logprobs": [None, -0.5, -0.5],
        "top_logprobs": [None, {" there": -0.5}, {"Hello": -0.5}],
        "text_offset": [0, 5, 11],
    }
    stream = await chunks(stack.client, COMPLETIONS, body)
    assert joined(stream) == [("Hello thereHello", "length")]
    columns = [chunk["choices"][0]["logprobs"] for chunk in stream]
    for name, column in choice["logprobs"].items():
        assert [one for part in columns for one in part[name]] == column


async def test_echoes_of_one_request_are_limited(demo_model: Path) -> None:
    async with serve(demo_model, chats=False, max_concurrent_requests=1024) as stack:
        body = {"prompt": ["international " * 300] * 128, "max_tokens": 1, "echo": True, "n": 8}
        refused = await stack.ask(COMPLETIONS, body)
        assert refused.status == 400
        assert "characters must be <= 4194304" in refused.body["error"]["message"]


async def test_logprobs_of_one_request_are_limited(stack: Stack) -> None:
    text = "a b c d " * 150
    prompts = [text] * 16
    for fields, named in (
        ({"prompt": prompts, "echo": True, "logprobs": 20}, "131072 log-probabilities of the prompt tokens"),
        ({"prompt": prompts, "echo": True, "logprobs": 20, "stream": True}, "131072 log-probabilities of the prompt"),
        ({"prompt": prompts, "prompt_logprobs": 20}, "131072 log-probabilities of the prompt tokens"),
        ({"prompt": text, "n": 128, "logprobs": 20, "max_tokens": 100}, "2048 log-probabilities of the new tokens"),
    ):
        refused = await stack.ask(COMPLETIONS, {"max_tokens": 1, **fields})
        assert (refused.status, named in refused.body["error"]["message"]) == (400, True)
    many = ["a b c d " * 60] * 128
    reply = await post(stack.client, COMPLETIONS, {"prompt": many, "echo": True, "logprobs": 1, "max_tokens": 1})
    assert len(reply["choices"]) == 128
    await stack.assert_empty()


async def test_a_long_reply_is_written_in_parts(stack: Stack) -> None:
    body = {"prompt": "a b c d", "max_tokens": 1500, "ignore_eos": True, "n": 32, "logprobs": 1}
    reply = await post(stack.client, COMPLETIONS, body)
    assert [len(choice["logprobs"]["tokens"]) for choice in reply["choices"]] == [1500] * 32
    assert reply["usage"]["completion_tokens"] == 48_000


async def test_max_tokens_0_shows_no_new_token(stack: Stack) -> None:
    body = {"prompt": "Hello there", "max_tokens": 0, "echo": True, "logprobs": 1}
    reply = await post(stack.client, COMPLETIONS, body)
    assert texts(reply) == ["Hello there"]
    assert reply["choices"][0]["logprobs"]["tokens"] == ["Hello", " there"]
    assert reply["usage"]["completion_tokens"] == 0
    assert joined(await chunks(stack.client, COMPLETIONS, body)) == [("Hello there", "length")]
    assert (await stack.ask(COMPLETIONS, body | {"echo": False})).status == 400


async def test_the_last_chunk_has_the_usage_where_it_is_asked_for(stack: Stack) -> None:
    body = {"prompt": ["Hello there", "you"], "max_tokens": 3, "ignore_eos": True, "min_tokens": 3}
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await chunks(stack.client, COMPLETIONS, body | {"stream_options": options})
    assert stream[-1]["choices"] == []
    assert stream[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9, **NONE_CACHED}
    first = [chunk["usage"] for chunk in stream[:-1] if chunk["choices"][0]["index"] == 0]
    assert [usage["completion_tokens"] for usage in first] == [1, 2, 3]
    assert all(usage["prompt_tokens"] == 2 for usage in first)
    assert all(chunk["usage"] is None for chunk in await chunks(stack.client, COMPLETIONS, body))


async def test_a_text_follows_its_regular_expression(stack: Stack) -> None:
    body = {"prompt": "word", "max_tokens": 40, "response_format": {"type": "regex", "value": "[a-f]{5}-[0-9]{3}"}}
    [text] = texts(await post(stack.client, COMPLETIONS, body))
    assert re.fullmatch("[a-f]{5}-[0-9]{3}", text)


async def test_nothing_is_left_behind(stack: Stack) -> None:
    await stack.assert_empty()
