"""dspy: chat, Responses, text completions, structured output and the class of an overflow."""

from __future__ import annotations

import dspy
import litellm
import pytest
from endpoint import ANSWER, OPENAI_URL, PROMPT, QUESTION, TOO_LONG, Capital

OPTIONS = {"api_base": OPENAI_URL, "api_key": "-", "temperature": 0, "max_tokens": 40, "cache": False, "num_retries": 0}


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_answer(kind: str) -> None:
    (answer,) = dspy.LM("openai/tgi", model_type=kind, **OPTIONS)(QUESTION)
    assert (answer if isinstance(answer, str) else answer["text"]) == ANSWER


def test_completions_with_logprobs() -> None:
    model = dspy.LM("text-completion-openai/tgi", model_type="text", logprobs=True, **OPTIONS)
    (answer,) = model(prompt=PROMPT)
    assert answer["text"].strip() == ANSWER
    assert answer["logprobs"]


def test_structured_output() -> None:
    (answer,) = dspy.LM("openai/tgi", **OPTIONS)(QUESTION, response_format=Capital)
    Capital.model_validate_json(answer)


def test_a_prompt_that_is_too_long() -> None:
    with pytest.raises((litellm.ContextWindowExceededError, dspy.ContextWindowExceededError)):
        dspy.LM("openai/tgi", **OPTIONS)(TOO_LONG)
