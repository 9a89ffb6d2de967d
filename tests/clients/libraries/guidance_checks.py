"""guidance over chat completions: text and JSON."""

from __future__ import annotations

import guidance
from endpoint import ANSWER, OPENAI_URL, QUESTION, Capital
from guidance.models import OpenAI


def test_text_and_json() -> None:
    model = OpenAI("tgi", base_url=OPENAI_URL, api_key="-", echo=False)
    with guidance.user():
        asked = model + QUESTION
    with guidance.assistant():
        said = asked + guidance.gen("text", max_tokens=20, temperature=0.01)
        chosen = asked + guidance.json("place", schema=Capital, temperature=0.01, max_tokens=40)
    assert said["text"] == ANSWER
    Capital.model_validate_json(chosen["place"])
