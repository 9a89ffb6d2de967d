"""README's first requests, run as they stand there, against servers of both number types."""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client_environments import run
from full_grid import full
from openai import OpenAI
from stack import running

pytestmark = [pytest.mark.system, pytest.mark.model]

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
FIRST = README[README.index("## First requests") : README.index("## How it works")]
CURL = re.findall(r"^\$ (curl (?:.*\\\n)*.*)\n((?:.*\n)*?)```", FIRST, re.MULTILINE)
SCRIPTS = re.findall(r"```python\n(.*?)```\n\nIt prints\n\n```text\n(.*?)```", FIRST, re.DOTALL)
PORT = "127.0.0.1:3000"
MARGIN = 1.0
"""The least difference of log-probability between a token and the next best. Number types and CPUs account for 0.25."""


@pytest.fixture(scope="module", params=["float32", full("bfloat16")])
def url(request: pytest.FixtureRequest, demo_model: Path) -> Iterator[str]:
    """The URL of a server that computes in this type."""
    if request.param == "float32":
        yield request.getfixturevalue("server").url
        return
    with running(demo_model, "--dtype", request.param, "--max-batch-prefill-tokens", "256", engine="torch") as stack:
        yield stack.url


def output(command: list[str], url: str) -> str:
    """The standard output of an example's command, sent to this server."""
    return run(*(part.replace(PORT, url.removeprefix("http://")) for part in command))


def values(text: str, tolerance: float | None = None) -> list[Any]:
    """The JSON values of an answer. With a tolerance its log-probabilities are equal to others within it."""

    def near(value: dict[str, Any]) -> dict[str, Any]:
        return {key: pytest.approx(item, abs=tolerance) if key == "logprob" else item for key, item in value.items()}

    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    return [json.loads(line, object_hook=near if tolerance else None) for line in lines]


def test_the_examples_print_what_the_readme_says(url: str) -> None:
    assert (len(CURL), len(SCRIPTS), FIRST.count(PORT)) == (2, 1, 4), "an example that no test runs"
    for command, printed in CURL:
        assert values(output(["bash", "-c", command], url)) == values(printed, tolerance=0.03)
    for code, printed in SCRIPTS:
        assert output([sys.executable, "-c", code], url) == printed


def test_each_token_of_the_examples_is_far_ahead_of_the_next_best(url: str) -> None:
    messages = ast.literal_eval(re.findall(r"^messages = (.*)$", FIRST, re.MULTILINE)[0])
    asked: dict[str, Any] = {"model": "tgi", "temperature": 0, "max_tokens": 8}
    with OpenAI(base_url=f"{url}/v1", api_key="-") as client:
        chat = client.chat.completions.create(**asked, messages=messages, logprobs=True, top_logprobs=2)
        assert chat.choices[0].logprobs is not None
        best = [[top.logprob for top in token.top_logprobs] for token in chat.choices[0].logprobs.content or []]
        for command, _ in CURL:
            prompt = json.loads(shlex.split(command)[-1])["inputs"]
            completion = client.completions.create(**asked, prompt=prompt, logprobs=2)
            assert completion.choices[0].logprobs is not None
            best += [list(tops.values()) for tops in completion.choices[0].logprobs.top_logprobs or []]
    assert len(best) == 23
    assert min(first - second for first, second, *_ in best) > MARGIN
