"""The server for client libraries, and its model's answer to one question."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import openai
from tokenizers import Tokenizer

QUESTION = "What is the capital of France? Answer in one English sentence."
ANSWER = "The capital of France is Paris."
"""The model's answer: seven tokens and the end-of-turn token, each far more probable than the next."""
ANSWER_TOKENS = 8
PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
)
"""The question as the model's chat template writes it."""
MAX_CONCURRENT = 8


CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "London"]}, "year": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "year"],
    "additionalProperties": False,
}
"""A JSON schema with short answers."""
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "London"]}},
    "required": ["city"],
    "additionalProperties": False,
}
"""The arguments of a tool."""
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather of a city", "parameters": PLACE, "strict": True},
}
"""The tool, as chat completions have it."""
MESSAGES: Any = [{"role": "user", "content": QUESTION}]


@dataclass(frozen=True)
class Server:
    """A ready server."""

    url: str
    model: str
    """The id of the model."""
    tokenizer: Tokenizer

    def count(self, text: str) -> int:
        """Number of tokens of a text."""
        return len(self.tokenizer.encode(text).ids)

    @contextmanager
    def full(self) -> Iterator[None]:
        """Hold all permits of the server inside the block."""
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="-", max_retries=0)
        with client:
            endless = client.completions.create(
                model="tgi", prompt="One, two,", n=MAX_CONCURRENT, max_tokens=500, stream=True
            )
            with endless:
                next(iter(endless))
                yield
            for _ in range(1000):
                try:
                    client.completions.create(model="tgi", prompt="One", n=MAX_CONCURRENT, max_tokens=1)
                except openai.RateLimitError:
                    continue
                return
        raise AssertionError("the client has left, its places are still taken")
