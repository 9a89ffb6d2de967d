"""Each HTTP parameter, and what of it arrives in TensorRT-LLM's SamplingParams; what would be lost is refused by name."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stack import running
from standin import VERSIONS, path_of, read_log

pytestmark = pytest.mark.system

WORDS = "one two three four five"
EOS = 2
"""The demo model's end of sequence."""
ALWAYS = {"detokenize": False, "include_stop_str_in_output": True}
"""What is said of every request."""
SETUPS = {
    "1.2": ("1.2", ()),
    "1.2 cxx": ("1.2", ("--trtllm-options", "sampler_type: TRTLLMSampler")),
    "1.3": ("1.3", ()),
}
LOSING = {"1.2"}
SCORING = {"1.3"}


class Serving:
    """A stack, and what arrives behind it."""

    def __init__(self, name: str, url: str, log: Path) -> None:
        self.name = name
        self._url = url
        self._log = log

    def ask(self, route: str, body: dict[str, Any]) -> tuple[int, Any, dict[str, Any] | None]:
        """(status, answer, sampling of the request that arrived, if one did)."""
        before = len(read_log(self._log).of("request"))
        request = urllib.request.Request(
            self._url + route, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                status, answer = response.status, json.load(response)
        except urllib.error.HTTPError as error:
            status, answer = error.code, json.load(error)
        arrived = read_log(self._log).of("request")[before:]
        return status, answer, arrived[0] if arrived else None


@pytest.fixture(scope="module", params=SETUPS)
def serving(
    request: pytest.FixtureRequest, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    version, args = SETUPS[request.param]
    log = tmp_path_factory.mktemp("standin") / "log"
    environ = {"PYTHONPATH": str(path_of(version)), "TRTLLM_STANDIN_LOG": str(log)}
    with running(demo_model, *args, engine="tensorrt-llm", environ=environ) as stack:
        yield Serving(request.param, stack.url, log)


def test_versions_are_those_that_there_are() -> None:
    assert {version for version, _ in SETUPS.values()} == set(VERSIONS)


TGI: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"top_k": 1}),
    ({"max_new_tokens": 7}, {"max_tokens": 7}),
    ({"do_sample": True}, {"temperature": 1.0}),
    ({"temperature": 0.5}, {"temperature": 0.5}),
    ({"top_k": 5}, {"top_k": 5, "temperature": 1.0}),
    ({"top_p": 0.9}, {"top_p": 0.9, "temperature": 1.0}),
    ({"do_sample": True, "seed": 42}, {"seed": 42}),
    ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    ({"frequency_penalty": 0.5}, {"frequency_penalty": 0.5}),
    ({"top_n_tokens": 3}, {"logprobs": 3}),
    ({"stop": ["four"]}, {}),
    ({"decoder_input_details": True, "details": True}, {"prompt_logprobs": 1}),
    ({"grammar": {"type": "regex", "value": "[a-z]{4}"}}, {"guided_decoding": None}),
]
"""(TGI's parameters, what arrives); None: something."""

OPENAI: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"max_tokens": 9}, {"max_tokens": 9}),
    ({"max_completion_tokens": 9}, {"max_tokens": 9}),
    ({"temperature": 0.7, "top_p": 0.8}, {"temperature": 0.7, "top_p": 0.8}),
    ({"temperature": 0}, {"top_k": 1}),
    ({"seed": 5, "temperature": 1}, {"seed": 5}),
    ({"presence_penalty": 0.5}, {"presence_penalty": 0.5, "prompt_ignore_length": None}),
    ({"frequency_penalty": 0.5}, {"frequency_penalty": 0.5, "prompt_ignore_length": None}),
    ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
    ({"min_p": 0.1, "temperature": 1}, {"min_p": 0.1}),
    ({"logit_bias": {"5": 2.0}}, {"embedding_bias": None}),
    ({"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
    ({"min_tokens": 3, "max_tokens": 9}, {"min_tokens": 3}),
    ({"ignore_eos": True}, {"ignore_eos": True}),
    ({"response_format": {"type": "json_object"}}, {"guided_decoding": None}),
]

NAMES = {
    "seed": "seed",
    "repetition_penalty": "repetition_penalty",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "min_p": "min_p",
    "min_tokens": "min_tokens",
}
"""Parameters that the losing sampler loses."""


def check(serving: Serving, route: str, body: dict[str, Any], asked: dict[str, Any], arrives: dict[str, Any]) -> None:
    status, answer, arrived = serving.ask(route, body)
    lost = [name for name in asked if serving.name in LOSING and name in NAMES]
    if "decoder_input_details" in asked and serving.name not in SCORING:
        lost.append("decoder_input_details")
    if lost:
        assert status == 422
        assert arrived is None
        assert f"`{lost[0]}` is not supported by this engine" in json.dumps(answer)
        return
    assert status == 200, answer
    assert arrived is not None
    sampling = arrived["sampling"]
    for name, value in (ALWAYS | arrives).items():
        assert name in sampling, sampling
        assert value is None or sampling[name] == pytest.approx(value)
    assert "logprobs" in sampling  # 0 would be none in 1.2
    assert (sampling.get("end_id") == EOS) or sampling.get("ignore_eos")
    if "seed" not in asked and serving.name in LOSING:
        assert "seed" not in sampling


@pytest.mark.parametrize(("asked", "arrives"), TGI, ids=lambda part: ",".join(part) or "nothing")
def test_tgi(serving: Serving, asked: dict[str, Any], arrives: dict[str, Any]) -> None:
    body = {"inputs": WORDS, "parameters": {"max_new_tokens": 5} | asked}
    check(serving, "/generate", body, asked, arrives)


@pytest.mark.parametrize(("asked", "arrives"), OPENAI, ids=lambda part: ",".join(part) or "nothing")
def test_openai(serving: Serving, asked: dict[str, Any], arrives: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 5} | asked
    if "max_completion_tokens" in asked:
        del body["max_tokens"]
    check(serving, "/v1/chat/completions", body, asked, arrives)


@pytest.mark.parametrize(("name", "value"), [("typical_p", 0.5), ("watermark", True)])
def test_what_no_version_has_is_refused_by_name(serving: Serving, name: str, value: object) -> None:
    body = {"inputs": WORDS, "parameters": {"max_new_tokens": 5, name: value}}
    status, answer, arrived = serving.ask("/generate", body)
    assert (status, arrived) == (422, None)
    assert f"`{name}` is not supported by this engine" in answer["error"]


def test_a_salt_keeps_prompts_apart_in_the_engines_own_cache(serving: Serving) -> None:
    salts = []
    for salt in ("a", "b", "a", None):
        body: dict[str, Any] = {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 2}
        _, _, arrived = serving.ask("/v1/chat/completions", body | ({"cache_salt": salt} if salt else {}))
        assert arrived is not None
        salts.append(arrived["with"].get("cache_salt"))
    assert salts[0] == salts[2] != salts[1]
    assert salts[3] is None
    assert salts[0] != "a"
