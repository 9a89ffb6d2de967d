"""outlines with its models for TGI, OpenAI and vLLM."""

from __future__ import annotations

from typing import Literal

import outlines
import pytest
from endpoint import ANSWER, OPENAI_URL, PROMPT, QUESTION, URL, Capital
from huggingface_hub import InferenceClient
from openai import OpenAI
from outlines.types import CFG, Regex

TGI = outlines.from_tgi(InferenceClient(URL))
CLIENT = OpenAI(base_url=OPENAI_URL, api_key="-", max_retries=0)
CHATS = {"openai": outlines.from_openai(CLIENT, "tgi"), "vllm": outlines.from_vllm(CLIENT, "tgi")}


def test_tgi() -> None:
    """The library leaves return_full_text out, so that TGI repeats the prompt at generate."""
    assert TGI(PROMPT, max_new_tokens=20).removeprefix(PROMPT) == ANSWER
    assert "".join(TGI.stream(PROMPT, max_new_tokens=20)).removesuffix("<|im_end|>") == ANSWER
    assert TGI(PROMPT, Literal["yes", "no"], max_new_tokens=20).removeprefix(PROMPT) in ("yes", "no")
    Capital.model_validate_json(TGI(PROMPT, Capital, max_new_tokens=40).removeprefix(PROMPT))
    assert TGI(PROMPT, Regex("[0-9]{4}"), max_new_tokens=20).removeprefix(PROMPT).isdecimal()


@pytest.mark.parametrize("kind", CHATS)
def test_chat(kind: str) -> None:
    model, options = CHATS[kind], {"max_tokens": 40, "temperature": 0}
    assert model(QUESTION, **options) == ANSWER
    assert "".join(model.stream(QUESTION, **options)) == ANSWER
    Capital.model_validate_json(model(QUESTION, Capital, **options))


def test_constraints_of_vllm() -> None:
    model, options = CHATS["vllm"], {"max_tokens": 20, "temperature": 0}
    assert model(QUESTION, Literal["yes", "no"], **options) in ("yes", "no")
    assert model(QUESTION, Regex("[0-9]{4}"), **options).isdecimal()
    assert model(QUESTION, CFG('start: "yes" | "no"'), **options) in ("yes", "no")
