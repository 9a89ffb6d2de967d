"""The death of a scheduler process or of an HTTP worker, with real processes: no request of another one fails or changes."""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from front_traffic import ReadAnswer, ask, mix
from router_workers import ProcessRouter, router, until
from tiny_checkpoint import random_tensors, write_checkpoint

PAUSE_S = 3.0
"""Longest pause of a stream, in the median of the deaths."""


class Traffic:
    """Requests of all kinds, sent at once to each worker in turn."""

    def __init__(self, count: int, tokens: int) -> None:
        self.mix = [mix(number, tokens) for number in range(count)]
        self.answers = [ReadAnswer() for _ in self.mix]

    @property
    def started(self) -> bool:
        """True if each stream has had its first token."""
        pairs = zip(self.mix, self.answers, strict=True)
        return all(answer.tokens or answer.ends for asked, answer in pairs if asked.streamed)

    async def run(
        self, served: ProcessRouter, meanwhile: Callable[[], Awaitable[None]] | None = None
    ) -> list[ReadAnswer]:
        """Send them, do something once all streams have started, and return the answers."""
        async with asyncio.TaskGroup() as tasks:
            for number, (asked, answer) in enumerate(zip(self.mix, self.answers, strict=True)):
                tasks.create_task(ask(served.clients[number % len(served.clients)], asked, answer))
            if meanwhile is not None:
                await until(lambda: self.started)
                await meanwhile()
        return self.answers


async def lose_scheduler(served: ProcessRouter, expected: list[ReadAnswer], tokens: int, hang_s: float = 0.0) -> float:
    """Replace the scheduler process under requests, whose answers are to be `expected`. Return the longest pause."""
    traffic = Traffic(len(expected), tokens)
    answers = await traffic.run(served, lambda: served.replace_scheduler(hang_s))
    for asked, answer, wanted in zip(traffic.mix, answers, expected, strict=True):
        assert answer == wanted, (asked, served.log()[-3000:])
    return max(answer.longest_gap for answer in answers)


async def test_requests_go_on_over_the_death_of_the_scheduler_process(demo_model: Path) -> None:
    async with router(demo_model, 2, step_ms=4) as served:
        expected = await Traffic(24, 150).run(served)
        assert all(answer.status == 200 and answer.texts for answer in expected)
        await lose_scheduler(served, expected, 150)
        await wait_without_scheduler(served, expected[0])
        await served.idle()


async def wait_without_scheduler(served: ProcessRouter, expected: ReadAnswer) -> None:
    """Requests wait for the next scheduler process, end in time, and are forgotten when their client leaves."""
    client = served.clients[0]
    stays, leaves, late, new = (ReadAnswer() for _ in range(4))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ask(client, mix(0, 150), stays))
        refused = ReadAnswer()
        leaving = tasks.create_task(ask(client, mix(0, 2000), leaves))
        began = asyncio.get_running_loop().time()
        timed = tasks.create_task(ask(client, mix(0, 2000), late, **{"x-request-timeout-ms": "1500"}))
        await until(lambda: all(answer.tokens for answer in (stays, leaves, late)))
        await served.kill_scheduler()
        tasks.create_task(ask(client, mix(0, 150), new))
        leaving.cancel()
        await ask(client, mix(0, 150), refused, **{"x-request-timeout-ms": "100"})
        assert (refused.status, new.tokens) == (408, 0)
        await timed
        assert asyncio.get_running_loop().time() - began < 1.5 + 0.5
        assert late.ends == [f"error: Request timed out: its time was over after {late.tokens} new tokens"]
        await served.start_scheduler()
    assert (stays, new) == (expected, expected)
    assert re.findall(r"requests submitted again.* requests=(\d+)", served.log(0))[-1:] == ["1"]


@pytest.fixture(scope="module")
def tiny_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random model of two layers, and the tokenizer of the demo model.

    Its logits are far apart: a prompt that is computed again, in other chunks, gives logits that differ in the last bits.
    """
    folder = tmp_path_factory.mktemp("tiny")
    shutil.copytree(
        demo_model, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"), dirs_exist_ok=True
    )
    changes = {"vocab_size": 49152, "max_position_embeddings": 2048, "eos_token_id": 2, "bos_token_id": 1}
    tensors = random_tensors(changes)
    tensors["lm_head.weight"] *= 4
    return write_checkpoint(folder, tensors, changes)


@pytest.mark.full
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("engine", ["echo", "torch"])
async def test_64_requests_survive_20_deaths_of_the_scheduler_process(
    demo_model: Path, tiny_model: Path, engine: str, replicas: int, record_property: Callable[[str, str], None]
) -> None:
    model, tokens = (demo_model, 250) if engine == "echo" else (tiny_model, 250)
    async with router(model, 2, step_ms=10, replicas=replicas, engine=engine) as served:
        expected = await Traffic(64, tokens).run(served)
        assert all(answer.status == 200 and answer.texts for answer in expected)
        pauses = []
        for number in range(20):
            hang_s = 0.5 if number % 5 == 4 else 0.0
            pauses.append(await lose_scheduler(served, expected, tokens, hang_s) - hang_s)
            await served.idle()
    median = statistics.median(pauses)
    record_property(
        "bar", f"{engine}, {replicas} replicas: pause {median:.2f} s in the median, {max(pauses):.2f} s at most"
    )
    assert median <= PAUSE_S


@pytest.mark.full
async def test_the_death_of_one_of_four_workers_closes_its_own_connections_only(
    demo_model: Path, record_property: Callable[[str, str], None]
) -> None:
    async with router(demo_model, 4, step_ms=5) as served:
        expected = await Traffic(48, 200).run(served)
        traffic = Traffic(48, 200)

        async def kill() -> None:
            served.workers[1].kill()
            await served.workers[1].wait()

        answers = await traffic.run(served, kill)
        began = time.monotonic()
        await served.restart(1)
        record_property("bar", f"a worker serves again after {time.monotonic() - began:.2f} s")
        for number, (answer, wanted) in enumerate(zip(answers, expected, strict=True)):
            assert number % 4 == 1 or answer == wanted
        assert all(answers[number].ends[-1:] != ["finished"] for number in range(1, 48, 4))
        assert await Traffic(48, 200).run(served) == expected
        await served.idle()


def resident(served: ProcessRouter) -> list[float]:
    """Resident memory of the scheduler process and of each worker, in MiB."""
    return [psutil.Process(each.pid).memory_info().rss / 2**20 for each in (served.scheduler, *served.workers)]


@pytest.mark.full
async def test_10000_random_ends_over_four_workers_leave_nothing(
    demo_model: Path, record_property: Callable[[str, str], None]
) -> None:
    """Clients that leave, deadlines, stop strings, refused bodies and whole answers: each request ends once."""
    draw = random.Random(1)
    ends: Counter[str] = Counter()

    async def client(served: ProcessRouter, count: int) -> None:
        for _ in range(count):
            asked, answer = mix(draw.randrange(1000), draw.choice([0, 1, 5, 40])), ReadAnswer()
            headers = draw.choice([{}, {}, {"x-request-timeout-ms": str(draw.choice([1, 20, 60]))}])
            stays_s = draw.choice([None, None, draw.uniform(0, 0.1)])
            try:
                async with asyncio.timeout(stays_s):
                    await ask(draw.choice(served.clients), asked, answer, **headers)
            except TimeoutError:
                ends["left"] += 1
                continue
            most = 2 if asked.body.get("n") == 2 or asked.body.get("parameters", {}).get("best_of") == 2 else 1
            assert 1 <= len(answer.ends) <= most, (asked, answer)
            ends[answer.ends[0].split(":")[0]] += 1

    async def clients(served: ProcessRouter, count: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(50):
                tasks.create_task(client(served, count // 50))
        await served.idle()

    async with router(demo_model, 4, step_ms=1) as served:
        await clients(served, 4000)
        before = resident(served)
        await clients(served, 6000)
        growth = [after - former for after, former in zip(resident(served), before, strict=True)]
    assert sum(ends.values()) == 10_000, ends
    assert len(ends) > 4, ends
    record_property("bar", f"ends: {dict(ends)}; growth in MiB: {[round(each, 1) for each in growth]}")
    assert max(growth) < 16, growth
