"""Grammars that exhaust a compiler's stack: each is refused or followed, and no shard dies of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
import pytest
from full_grid import full
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
    with running(demo_model, "--num-replicas", "2", within=limited) as stack:
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
