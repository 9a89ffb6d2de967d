"""The openai Python client: completions."""

from __future__ import annotations

import math
from typing import Any

import pytest
from client_server import ANSWER, PROMPT, Server
from openai import OpenAI

pytestmark = [pytest.mark.system, pytest.mark.model]

GREEDY: dict[str, Any] = {"model": "tgi", "temperature": 0, "max_tokens": 20}


def test_logprobs_of_the_prompt(openai_client: OpenAI, server: Server) -> None:
    """Evaluation tools ask for log-probabilities of a text without new tokens."""
    text = "The capital of France is Paris."
    reply = openai_client.completions.create(
        model="tgi", prompt=text, echo=True, logprobs=1, max_tokens=0, temperature=0
    )
    choice = reply.choices[0]
    assert choice.text == text
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [server.tokenizer.decode([one]) for one in server.tokenizer.encode(text).ids]
    first, *others = choice.logprobs.token_logprobs or []
    assert first is None
    assert all(-50 < logprob < 0 for logprob in others)
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (server.count(text), 0)
    # As generated tokens they have the same log-probabilities.
    ids = server.tokenizer.encode(PROMPT).ids + server.tokenizer.encode(ANSWER).ids
    whole = openai_client.completions.create(**GREEDY | {"max_tokens": 0}, prompt=ids, echo=True, logprobs=1)
    answer = openai_client.completions.create(**GREEDY, prompt=PROMPT, logprobs=1)
    assert whole.choices[0].logprobs is not None
    assert answer.choices[0].logprobs is not None
    read = (whole.choices[0].logprobs.token_logprobs or [])[-7:]
    written = (answer.choices[0].logprobs.token_logprobs or [])[:7]
    assert all(math.isclose(one, other, abs_tol=1e-3) for one, other in zip(read, written, strict=True))
