"""Structured output over HTTP: answers follow their schemas, and hostile grammars are refused without delay for others.

GRAMMAR_REQUESTS is the number of random schemas (default 20; the target is 500).
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import orjson
import psutil
import pytest
from http_stack import Stack, serve, served
from random_schemas import Schemas
from sse_client import chunks, post

Json = dict[str, Any]

REQUESTS = int(os.environ.get("GRAMMAR_REQUESTS", "20"))
AT_ONCE = 8

pytestmark = pytest.mark.asyncio(loop_scope="module")


stack = served(grammars=True, settings={"payload_limit": 8_000_000})


def asking(schema: Json) -> Json:
    return {"messages": [{"role": "user", "content": "{"}], "max_tokens": 400, "response_format": schema_form(schema)}


async def test_answers_to_random_schemas_satisfy_them_streamed_or_not(stack: Stack) -> None:
    seeds = iter(range(REQUESTS))
    unfinished = 0

    async def worker() -> None:
        nonlocal unfinished
        for seed in seeds:
            schema = Schemas(seed).draw()
            body = asking(schema)
            [choice] = (await post(stack.client, "/v1/chat/completions", body))["choices"]
            text = choice["message"]["content"]
            stream = await chunks(stack.client, "/v1/chat/completions", body)
            assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in stream) == text
            if choice["finish_reason"] == "length":
                unfinished += 1  # the echo engine never leaves some numbers and patterns
                continue
            assert choice["finish_reason"] == "stop"
            jsonschema.validate(orjson.loads(text), schema, jsonschema.Draft202012Validator)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(worker())
    assert unfinished <= REQUESTS / 3


async def test_rules_and_structural_tags_are_followed(stack: Stack) -> None:
    async def content(**fields: object) -> str:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 30, **fields}
        [choice] = (await post(stack.client, "/v1/chat/completions", body))["choices"]
        return str(choice["message"]["content"])

    assert await content(guided_grammar='root ::= "a" b\nb ::= "(" b ")" | "b"', max_tokens=1) == "a"
    assert await content(structured_outputs={"grammar": 'start: "yes" | "yes" start "no"'}, stop=["no"]) == "yes"
    tag = {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]"}, "end": "</n>"}
    assert re.fullmatch("<n>[0-9]</n>", await content(response_format={"type": "structural_tag", "format": tag}))
    body = {"prompt": "x", "regex": "q{3}", "max_tokens": 9}
    [choice] = (await post(stack.client, "/v1/completions", body))["choices"]
    assert choice["text"] == "qqq"


def nested_one_of(depth: int) -> Json:
    schema: Json = {"type": "string"}
    for _ in range(depth):
        schema = {"oneOf": [schema, {"type": "object", "properties": {"a": schema}}]}
    return schema


def recursive() -> Json:
    node: Json = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def schema_form(schema: Json) -> Json:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def slow(count: int, prefix: str = "p") -> Json:
    """Return a form with as many patterns that take long to compile."""
    patterns = {f"{prefix}{i}": {"type": "string", "pattern": f"^[a-z]*{i}[^{i % 9}]+$"} for i in range(count)}
    return schema_form({"type": "object", "properties": patterns})


HOSTILE: list[tuple[str, Json]] = [
    ("counted repetition", {"type": "regex", "value": "(.{1,1000}){1,1000}"}),
    ("nested oneOf", schema_form(nested_one_of(12))),
    ("recursion", schema_form(recursive())),
    ("itself", schema_form({"$ref": "#"})),
    ("five megabytes", schema_form({"enum": ["x" * 100 + str(i) for i in range(46000)]})),
    ("many patterns", slow(3900)),
    ("a bad pattern", schema_form({"type": "string", "pattern": "("})),
    ("look-around", {"type": "regex", "value": "(?=a)b"}),
]
HOSTILE_RULES = {
    "ambiguity": "root ::= " + '("a" | "aa")* ' * 30,
    "nothing but itself": "root ::= root",
    "depth": "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000,
    "chain": "".join(f"r{i} ::= r{i + 1}\n" for i in range(9_000)) + 'root ::= r0\nr9000 ::= "a"',
    "expansion": "start: /((a{1,100}){1,100}){1,100}/",
}
HEADERS = {"content-type": "application/json"}


def encoded(form: Json | str) -> bytes:
    """Return a body with this grammar; a text is one of rules."""
    asked = {"ebnf": form} if isinstance(form, str) else {"response_format": form}
    return orjson.dumps({"messages": [{"role": "user", "content": "a"}], **asked, "max_tokens": 50})


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its workers, those that were killed included."""
    seconds = sum(os.times()[:4])
    for worker in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = worker.cpu_times()
            seconds += times.user + times.system
    return seconds


@pytest.mark.parametrize("name", [*dict(HOSTILE), *HOSTILE_RULES])
async def test_a_hostile_grammar_is_refused_with_a_reason_and_soon(stack: Stack, name: str) -> None:
    started = cpu_seconds()
    body = encoded((dict(HOSTILE) | HOSTILE_RULES)[name])
    async with stack.client.post("/v1/chat/completions", data=io.BytesIO(body), headers=HEADERS) as response:
        answer = await response.json()
        assert response.status == 400, answer
    assert cpu_seconds() - started < 12, "each job has 1.5 s of CPU time"
    assert answer["error"]["message"].startswith("Input validation error: ")
    assert len(answer["error"]["message"]) < 1000
    assert stack.permits.in_use == 0


async def gaps(stack: Stack, tokens: int) -> list[float]:
    """Return the seconds between the tokens of a stream, sorted."""
    body = {"inputs": "word word word", "parameters": {"max_new_tokens": tokens}}
    arrivals = []
    async with stack.client.post("/generate_stream", json=body) as response:
        async for line in response.content:
            if line.startswith(b"data:"):
                arrivals.append(time.monotonic())
    return sorted(later - earlier for earlier, later in pairwise(arrivals))


async def test_another_stream_does_not_wait_for_hostile_grammars(demo_model: Path) -> None:
    async with serve(demo_model, grammars=True, settings={"payload_limit": 8_000_000}, echo_step_ms=20) as stack:
        quiet = await gaps(stack, 100)
        bodies = [encoded(form) for _, form in HOSTILE]

        async def attack() -> None:
            for body in bodies:
                sent = {"data": io.BytesIO(body), "headers": HEADERS}
                async with stack.client.post("/v1/chat/completions", **sent) as response:
                    assert response.status == 400

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(attack())
            under_attack = tasks.create_task(gaps(stack, 200))
        # One that was compiled on the event loop would take seconds, in as many gaps as there are grammars.
        assert under_attack.result()[int(0.98 * 199)] < 2 * quiet[int(0.98 * 99)] + 0.5


async def test_many_hostile_grammars_at_once_are_all_refused_soon(stack: Stack) -> None:
    """A request that finds no worker in time is refused with 429."""

    async def request(number: int) -> int:
        body = orjson.loads(encoded(slow(3800, f"p{number}_")))
        async with stack.client.post("/v1/chat/completions", json=body) as response:
            await response.read()
        return response.status

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        answers = [tasks.create_task(request(number)) for number in range(16)]
    assert {answer.result() for answer in answers} <= {400, 429}


async def test_nothing_is_left_behind(stack: Stack) -> None:
    await stack.assert_empty()
