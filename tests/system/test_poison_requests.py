"""Grammars that exhaust a compiler's stack or the time of masks: no shard dies of one, and no other stream waits."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
import pytest
from full_grid import full
from harm import TRIES
from stack import running

pytestmark = pytest.mark.system

LENGTHS = range(100, 2760, 50)


def rules(length: int) -> str:
    """Return rules in a row, each inside the one before."""
    return "start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(length)) + f'r{length}: "b"\n'


def terminals(length: int) -> str:
    """Return terminals in a row."""
    return "start: A0\n" + "".join(f'A{i}: "a" A{i + 1}\n' for i in range(length)) + f'A{length}: "b"\n'


def nested(length: int) -> str:
    """Return groups inside each other."""
    return "start: " + '("a" ' * length + '"b"' + ")" * length


def costly(number: int) -> str:
    """Return rules whose cheap beginning is longer than the proof's walks; the rest takes milliseconds for each token."""
    rules = "".join(f"r{i}: r{i} X{i} | X{i}\nX{i}: /[a-z]{{1,8}} ?{i % 10}?/\n" for i in range(100))
    start = " | ".join(f"r{i}" for i in range(100))
    return f'start: P ({start}) END\nP: /[ab]{{320}}/\nEND: "!{number}"\n{rules}'


async def rate(session: aiohttp.ClientSession, seconds: float) -> float:
    """Return the tokens a second of a stream of the quiet tenant."""
    body, tokens, started = {"inputs": "one two three", "parameters": {"max_new_tokens": 4000}}, 0, time.perf_counter()
    async with session.post("/generate_stream", json=body, headers={"authorization": "Bearer quiet"}) as response:
        while time.perf_counter() < started + seconds:
            await response.content.readuntil(b"\n\n")
            tokens += 1
    return tokens / (time.perf_counter() - started)


@pytest.mark.full
async def test_costly_grammars_do_not_slow_another_tenant(
    demo_model: Path, record_property: Callable[[str, str], None]
) -> None:
    quiet = []
    with running(demo_model, "--echo-step-ms", "20", environ={"API_KEY": "noisy,quiet"}, grammars=True) as stack:
        async with aiohttp.ClientSession(stack.url) as session:

            async def noise(start: str) -> None:
                for number in itertools.count():
                    grammar = {"grammar": costly(number)} if start == "costly" else {"regex": f"[ab ]{{500}}{number}"}
                    body = {"prompt": "a b a b", "n": 64, "max_tokens": 400, "structured_outputs": grammar}
                    headers = {"authorization": "Bearer noisy"}
                    async with session.post("/v1/completions", json=body, headers=headers) as response:
                        await response.read()

            for kind in ("cheap", "costly"):
                beside = asyncio.create_task(noise(kind))  # noqa: TID251 - ends with this block
                quiet.append(max([await rate(session, 4.0) for _ in range(TRIES)]))
                beside.cancel()
    record_property("bar", f"tokens/s beside cheap and costly grammars: {quiet[0]:.1f}, {quiet[1]:.1f}")
    assert quiet[1] >= 0.8 * quiet[0]


@pytest.mark.parametrize(
    ("stack_kb", "makers", "lengths"),
    [
        ("unlimited", [rules], (100, 1800)),
        full("unlimited", [rules, terminals, nested], LENGTHS),
        full("8192", [rules, terminals, nested], LENGTHS),
    ],
)
async def test_no_grammar_ends_a_shard(
    demo_model: Path, stack_kb: str, makers: Sequence[Callable[[int], str]], lengths: Sequence[int]
) -> None:
    limited = ("bash", "-c", f'ulimit -s {stack_kb} && exec "$@"', "bash")
    with running(demo_model, "--num-replicas", "2", within=limited, grammars=True) as stack:
        before = [stack.shard(replica).pid for replica in (0, 1)]
        async with aiohttp.ClientSession(stack.url) as session:

            async def ask(grammar: str) -> int:
                body = {"prompt": "x", "max_tokens": 3, "structured_outputs": {"grammar": grammar}}
                async with session.post("/v1/completions", json=body) as response:
                    answer = await response.json()
                    assert response.status == 200 or "message" in answer["error"], answer
                    return response.status

            statuses = [await ask(make(length)) for make in makers for length in lengths]
        assert set(statuses) == {200, 400}
        assert [stack.shard(replica).pid for replica in (0, 1)] == before
