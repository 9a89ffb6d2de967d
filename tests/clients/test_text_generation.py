"""text-generation 0.7.0, TGI's former client: Client and AsyncClient.

Its streamed chats are not tried: its chunks must have `tool_calls` in each delta, which TGI 3 does not send either, and the
sync client reads [DONE] as JSON.
"""

from __future__ import annotations

import json

import jsonschema
import pytest
from client_server import ANSWER, ANSWER_TOKENS, PLACE, PROMPT, QUESTION, Server
from text_generation import Client
from text_generation.errors import OverloadedError, ValidationError
from text_generation.types import FinishReason, Message, Tool

pytestmark = [
    pytest.mark.system,
    pytest.mark.model,
    pytest.mark.filterwarnings("ignore:The `dict` method is deprecated"),  # it was written for pydantic 1
]

MESSAGES = [Message(role="user", content=QUESTION)]


@pytest.fixture
def client(server: Server) -> Client:
    return Client(server.url, timeout=60)


def test_text(client: Client, server: Server) -> None:
    reply = client.generate(PROMPT, max_new_tokens=20, decoder_input_details=True, top_n_tokens=2)
    details = reply.details
    assert reply.generated_text == ANSWER
    assert (details.finish_reason, details.generated_tokens) == (FinishReason.EndOfSequenceToken, ANSWER_TOKENS)
    assert "".join(token.text for token in details.tokens if not token.special) == ANSWER
    assert [token.id for token in details.prefill] == server.tokenizer.encode(PROMPT).ids
    assert [tops[0].id for tops in details.top_tokens or []] == [token.id for token in details.tokens]


def test_best_of(client: Client) -> None:
    details = client.generate("One, two,", max_new_tokens=2, do_sample=True, best_of=2).details
    (other,) = details.best_of_sequences or []
    chosen = [token.logprob for token in details.tokens]
    assert len(chosen) == other.generated_tokens == 2
    assert sum(one or 0.0 for one in chosen) >= sum(token.logprob or 0.0 for token in other.tokens)


def test_text_as_a_stream(client: Client) -> None:
    events = list(client.generate_stream(PROMPT, max_new_tokens=20))
    assert "".join(event.token.text for event in events if not event.token.special) == ANSWER
    assert [event.generated_text for event in events] == [None] * 7 + [ANSWER]
    ending = events[-1].details
    assert ending is not None
    assert (ending.finish_reason, ending.generated_tokens) == (FinishReason.EndOfSequenceToken, ANSWER_TOKENS)


def test_chat_with_required_tool(client: Client) -> None:
    tool = Tool(type="function", function={"name": "get_weather", "description": "", "parameters": PLACE})
    reply = client.chat(MESSAGES, max_tokens=40, temperature=0.0, tools=[tool], tool_choice="get_weather")
    (call,) = reply.choices[0].message.tool_calls
    assert call["function"]["name"] == "get_weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), PLACE)


def test_invalid_request(client: Client) -> None:
    """Whole and streamed: the error comes before the first event."""
    with pytest.raises(ValidationError, match=r"Input validation error: `best_of` must be > 0 and <= 2\. Given: 3"):
        client.generate("Hi", do_sample=True, best_of=3)
    with pytest.raises(ValidationError, match="Input validation error: `inputs` tokens"):
        list(client.generate_stream("Hi", max_new_tokens=2000))


def test_overloaded_server(client: Client, server: Server) -> None:
    with server.full():
        with pytest.raises(OverloadedError, match="Model is overloaded"):
            client.generate("Hi")
        with pytest.raises(OverloadedError, match="Model is overloaded"):
            list(client.generate_stream("Hi"))
