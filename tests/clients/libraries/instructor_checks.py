"""instructor, in its modes for OpenAI and Anthropic."""

from __future__ import annotations

import anthropic
import instructor
import openai
import pytest
from endpoint import OPENAI_URL, QUESTION, URL, Capital
from instructor import Mode

MESSAGES = [{"role": "user", "content": QUESTION}]
ASKED = {"model": "tgi", "response_model": Capital, "messages": MESSAGES, "max_retries": 1}


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA])
def test_chat(mode: Mode) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=OPENAI_URL, api_key="-", max_retries=0), mode=mode)
    assert isinstance(client.chat.completions.create(**ASKED, temperature=0, max_tokens=40), Capital)


def test_a_partial_stream() -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=OPENAI_URL, api_key="-", max_retries=0))
    *_, last = client.chat.completions.create_partial(**ASKED, temperature=0, max_tokens=40)
    assert last.city in ("Paris", "London")


def test_responses() -> None:
    client = openai.OpenAI(base_url=OPENAI_URL, api_key="-", max_retries=0)
    patched = instructor.from_openai(client, mode=Mode.RESPONSES_TOOLS)
    answer = patched.responses.create(
        model="tgi", input=QUESTION, response_model=Capital, max_retries=1, temperature=0, max_output_tokens=40
    )
    assert isinstance(answer, Capital)


def test_messages() -> None:
    client = instructor.from_anthropic(anthropic.Anthropic(base_url=URL, api_key="-", max_retries=0), mode=Mode.TOOLS)
    assert isinstance(client.messages.create(**ASKED, max_tokens=40), Capital)
