"""The openai Python client: error types and the model list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from client_server import Server
from openai import OpenAI

pytestmark = [pytest.mark.system, pytest.mark.model]

HI: dict[str, Any] = {"model": "tgi", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_invalid_request(openai_client: OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        openai_client.chat.completions.create(**HI | {"temperature": -1}, stream=stream)
    error = refused.value
    assert (error.status_code, error.type) == (400, "invalid_request_error")
    assert "`temperature` must be >= 0.0" in error.message
    assert error.request_id


def test_too_long_a_prompt(openai_client: OpenAI) -> None:
    too_long = r"`inputs` tokens \+ `max_new_tokens` must be <= 1024\. Given: 1000 `inputs` tokens and 100"
    with pytest.raises(openai.BadRequestError, match=too_long):
        openai_client.completions.create(model="tgi", prompt=[1] * 1000, max_tokens=100)
    with pytest.raises(openai.BadRequestError, match=r"`inputs` must have less than 1023 tokens\. Given: 1024"):
        openai_client.completions.create(model="tgi", prompt=[1] * 1024)


def test_overloaded_server(openai_client: OpenAI, server: Server) -> None:
    with server.full(), pytest.raises(openai.RateLimitError) as refused:
        openai_client.chat.completions.create(**HI)
    assert (refused.value.status_code, refused.value.type) == (429, "rate_limit_error")


def test_models(openai_client: OpenAI, server: Server) -> None:
    model, by_path = openai_client.models.list().data
    assert (model.id, model.object, by_path.id) == (Path(server.model).name, "model", server.model)
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] == 1024
    assert openai_client.models.retrieve(server.model) == by_path
    with pytest.raises(openai.NotFoundError, match=f"`gpt-5` does not exist. This server has `{model.id}`"):
        openai_client.models.retrieve("gpt-5")
