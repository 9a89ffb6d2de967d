"""litellm, and its proxy in front of the server."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import litellm
import openai
import pytest
from endpoint import ANSWER, OPENAI_URL, QUESTION, TOO_LONG, URL, Capital

KEY = f"sk-{secrets.token_hex(32)}"
"""The proxy's key."""
MESSAGES = [{"role": "user", "content": QUESTION}]
ROUTES = {
    "openai": {"model": "openai/tgi", "api_base": OPENAI_URL, "api_key": "-"},
    "vllm": {"model": "hosted_vllm/tgi", "api_base": OPENAI_URL, "api_key": "-"},
    "huggingface": {"model": "huggingface/tgi", "api_base": OPENAI_URL, "api_key": "-"},
    "anthropic": {"model": "anthropic/tgi", "api_base": URL, "api_key": "-"},
}
GREEDY = {"messages": MESSAGES, "temperature": 0, "max_tokens": 40, "num_retries": 0}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": Capital.model_json_schema()}}


@pytest.mark.parametrize("route", ROUTES)
def test_chat_stream_and_tools(route: str) -> None:
    assert litellm.completion(**ROUTES[route], **GREEDY).choices[0].message.content == ANSWER
    stream = litellm.completion(**ROUTES[route], **GREEDY, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == ANSWER
    reply = litellm.completion(**ROUTES[route], **GREEDY, tools=[TOOL], tool_choice="required")
    (call,) = reply.choices[0].message.tool_calls
    Capital.model_validate_json(call.function.arguments)


@pytest.mark.parametrize("route", ["openai", "vllm"])
def test_structured_output(route: str) -> None:
    reply = litellm.completion(**ROUTES[route], **GREEDY, response_format=Capital)
    Capital.model_validate_json(reply.choices[0].message.content)


@pytest.mark.parametrize("route", ["openai", "vllm", "anthropic"])
def test_a_prompt_that_is_too_long(route: str) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**ROUTES[route], **GREEDY | {"messages": [{"role": "user", "content": TOO_LONG}]})


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a running proxy."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    models = [{"model_name": "tgi", "litellm_params": ROUTES["openai"]}]
    config = tmp_path_factory.mktemp("proxy") / "config.yaml"
    config.write_text(json.dumps({"model_list": models, "litellm_settings": {"num_retries": 0}}))
    command = [
        Path(sys.executable).with_name("litellm"),
        "--config",
        config,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    environ = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": KEY}
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(600):
                try:
                    with urllib.request.urlopen(f"{url}/health/liveliness", timeout=5):
                        break
                except OSError:
                    assert process.poll() is None, "the proxy has ended"
                    time.sleep(0.2)
            yield url
        finally:
            process.terminate()


def test_the_proxy(proxy: str) -> None:
    with openai.OpenAI(base_url=f"{proxy}/v1", api_key=KEY, max_retries=0) as client:
        asked = {"model": "tgi", "messages": MESSAGES, "temperature": 0, "max_tokens": 40}
        assert client.chat.completions.create(**asked).choices[0].message.content == ANSWER
        stream = client.chat.completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == ANSWER
        response = client.responses.create(model="tgi", input=QUESTION, temperature=0, max_output_tokens=40)
        assert response.output_text == ANSWER
        with pytest.raises(openai.BadRequestError, match="ContextWindowExceededError"):
            client.chat.completions.create(**asked | {"messages": [{"role": "user", "content": TOO_LONG}]})


def test_messages_through_the_proxy(proxy: str) -> None:
    body = {"model": "tgi", "messages": MESSAGES, "max_tokens": 40, "temperature": 0}
    request = urllib.request.Request(
        f"{proxy}/v1/messages", json.dumps(body).encode(), {"Content-Type": "application/json", "x-api-key": KEY}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["content"][0]["text"] == ANSWER
