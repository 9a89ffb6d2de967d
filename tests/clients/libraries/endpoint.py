"""The server, the question and the types that the checks of client libraries use."""

import os
from typing import Literal

from pydantic import BaseModel

URL = os.environ["SERVER_URL"]
OPENAI_URL = f"{URL}/v1"
QUESTION = os.environ["QUESTION"]
ANSWER = os.environ["ANSWER"]
PROMPT = os.environ["PROMPT"]
"""The question as the model's chat template writes it."""
TOO_LONG = "word " * 3000
"""Longer than the server allows."""


class Capital(BaseModel):
    """The capital of a country."""

    city: Literal["Paris", "London"]


def get_weather(city: Literal["Paris", "London"]) -> str:
    """Get the weather of a city.

    Args:
        city: The name of the city.
    """
    return f"It is sunny in {city}."
