"""kill -9 of a process of the router under requests, through the launcher: no other request fails or changes.

Each test prints its figures (pytest -rP). A busy machine starts a process late, so limits of time grow with that time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import aiohttp
import psutil
import pytest
from front_traffic import MixedRequest, ReadAnswer, ask, mix
from router_workers import load_s, until
from stack import Stack, running

pytestmark = [pytest.mark.system, pytest.mark.full]

SCHEDULER = "router-scheduler"
DEATHS = 20
PAUSE_S = 3.0
"""Longest pause of a stream at the death of the scheduler process, on an idle machine."""
SERVES_AGAIN_S = 2.0
"""Longest time until a dead HTTP worker serves again, on an idle machine."""


async def answered(
    url: str, asked: Sequence[MixedRequest], meanwhile: Callable[[list[ReadAnswer]], Awaitable[None]] | None = None
) -> list[ReadAnswer]:
    """Send requests at once, each on a connection of its own; once all streams have started, do something."""
    answers = [ReadAnswer() for _ in asked]
    streams = [answer for answer, each in zip(answers, asked, strict=True) if each.streamed]
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(url, connector=connector) as client, asyncio.TaskGroup() as tasks:
        for each, answer in zip(asked, answers, strict=True):
            tasks.create_task(ask(client, each, answer))
        if meanwhile is not None:
            await until(lambda: all(answer.tokens or answer.ends for answer in streams))
            await meanwhile(answers)
    return answers


async def kill_scheduler(stack: Stack, answers: Sequence[ReadAnswer]) -> None:
    """Kill the scheduler process; return once there is another one and the answers grow again."""
    dead = stack.router()[SCHEDULER]
    dead.kill()
    enough = sum(answer.tokens for answer in answers) + 5 * len(answers)
    await until(lambda: sum(each.tokens for each in answers) >= enough or all(each.ends for each in answers))
    await until(lambda: stack.router().get(SCHEDULER, dead) != dead)


async def check_deaths(stack: Stack, replicas: int, asked: Sequence[MixedRequest], deaths: int) -> None:
    """Kill the scheduler process under requests, several times while they run. Print and check their failures and pauses."""
    limit_s = max(PAUSE_S, 3 * await load_s())
    shards = [stack.shard(number).pid for number in range(replicas)]
    expected = await answered(stack.url, asked)
    assert all(answer.status == 200 and answer.texts for answer in expected)
    failed = different = done = 0
    pauses = []

    async def kill(answers: list[ReadAnswer]) -> None:
        nonlocal done
        while done < deaths and sum(not answer.ends for answer in answers) > len(asked) / 2:
            await kill_scheduler(stack, answers)
            done += 1

    while done < deaths:
        answers = await answered(stack.url, asked, kill)
        failed += sum(answer.status != 200 or "rror" in str(answer.ends) for answer in answers)
        different += sum(answer != wanted for answer, wanted in zip(answers, expected, strict=True))
        pauses.append(max(answer.longest_gap for answer in answers))
    sent = f"{len(asked)} requests, {len(pauses)} times; {done} deaths of the scheduler process, {replicas} replicas"
    print(f"{sent}: {failed} failed, {different} different, longest pause {max(pauses):.2f} s")
    assert (failed, different) == (0, 0)
    assert max(pauses) <= max(limit_s, 3 * await load_s())
    assert shards == [stack.shard(number).pid for number in range(replicas)], "the shards keep their weights"


@pytest.mark.parametrize("replicas", [1, 2])
async def test_64_requests_survive_20_deaths_of_the_scheduler_process(echo_model: Path, replicas: int) -> None:
    flags = ("--http-workers=2", "--echo-step-ms=10", f"--num-replicas={replicas}")
    with running(echo_model, *flags, grammars=True) as stack:
        await check_deaths(stack, replicas, [mix(number, 600) for number in range(64)], DEATHS)


async def test_answers_of_a_model_are_the_same_over_deaths_of_the_scheduler_process(demo_model: Path) -> None:
    """Greedy, drawn with a seed, and constrained by a grammar. In float32: in bfloat16 a token depends on its batch."""
    asked = [mix(number, 60) for number in (0, 1, 2, 6, 7, 12, 13, 14)]
    with running(demo_model, "--http-workers=2", "--dtype=float32", engine="torch") as stack:
        await check_deaths(stack, 1, asked, 3)


async def test_the_death_of_one_of_four_http_workers_closes_its_own_connections_only(echo_model: Path) -> None:
    asked = [mix(12 * number, 500) for number in range(96)]
    with running(echo_model, "--http-workers=4", "--echo-step-ms=10", grammars=True) as stack:
        limit_s = max(SERVES_AGAIN_S, 3 * await load_s())
        expected = await answered(stack.url, asked)
        before, served, again_s = stack.router(), 0, 0.0

        async def kill(answers: list[ReadAnswer]) -> None:
            nonlocal served, again_s
            victim = before["http-worker-2"]
            served = sum(each.status == psutil.CONN_ESTABLISHED for each in victim.net_connections("tcp"))
            victim.kill()
            began = time.monotonic()
            again = await asyncio.to_thread(stack.wait_for, "router serves again")
            again_s = time.monotonic() - began
            assert again["child"] == "http-worker-2"

        answers = await answered(stack.url, asked, kill)
        whole = [(answer, wanted) for answer, wanted in zip(answers, expected, strict=True) if answer == wanted]
        lost = [answer for answer, wanted in zip(answers, expected, strict=True) if answer != wanted]
        gap_s, usual_s = (max(pair[which].longest_gap for pair in whole) for which in (0, 1))
        print(
            f"{served} of {len(asked)} streams were the dead worker's, {len(lost)} ended; serves again after"
            f" {again_s:.2f} s; longest gap of the others {gap_s * 1e3:.0f} ms, without a death {usual_s * 1e3:.0f} ms"
        )
        assert 0 < served == len(lost)
        assert all("ClientPayloadError" in answer.ends for answer in lost)
        assert again_s <= max(limit_s, 3 * await load_s())
        assert gap_s <= max(0.25, again_s / 4), "no other stream waits for it"
        after = stack.router()
        assert {name for name in before if before[name].pid != after[name].pid} == {"http-worker-2"}
        assert await answered(stack.url, asked) == expected
