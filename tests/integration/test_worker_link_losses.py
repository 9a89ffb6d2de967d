"""The death of a scheduler process or of an HTTP worker, with real processes: no request of another one fails or changes."""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import signal
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import psutil
import pytest
from front_traffic import MixedRequest, ReadAnswer, ask, mix
from router_workers import ProcessRouter, load_s, router, until
from tiny_checkpoint import random_tensors, write_checkpoint

from text_generation_router.worker_link.remote_cluster import UNLOAD_AFTER_S
from text_generation_router.worker_link.scheduler_link import WITHOUT_LINK_S

PERMITS = 100
PAUSE_S = 3.0
"""Longest pause of a stream, in the median of the deaths, on an idle machine."""


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


async def test_requests_go_on_over_the_death_of_the_scheduler_process(echo_model: Path) -> None:
    async with router(echo_model, 2, step_ms=4) as served:
        expected = await Traffic(24, 150).run(served)
        assert all(answer.status == 200 and answer.texts for answer in expected)
        await lose_scheduler(served, expected, 150)
        await wait_without_scheduler(served, expected[0])
        await served.idle()


@pytest.mark.full
async def test_an_adapter_that_is_unloaded_while_it_is_used_stays_unloaded(echo_model: Path, tmp_path: Path) -> None:
    """The scheduler process dies between the unload and the end of the last request."""
    (tmp_path / "sql").mkdir()
    body = {"inputs": "one two", "parameters": {"adapter_id": "sql", "max_new_tokens": 150}}
    asked = MixedRequest("/generate_stream", body)

    async def post(client: aiohttp.ClientSession, path: str, body: dict[str, object]) -> int:
        async with client.post(path, json=body) as response:
            await response.read()
            return response.status

    shards = (f"--lora-modules-dir={tmp_path}",)
    async with router(echo_model, 2, "--disable-grammar-support", step_ms=10, shard_flags=shards) as served:
        load = {"lora_name": "sql", "lora_path": "sql"}
        assert await post(served.clients[0], "/v1/load_lora_adapter", load) == 200
        answers = ReadAnswer(), ReadAnswer()
        async with asyncio.TaskGroup() as tasks:
            for client, answer in zip(served.clients, answers, strict=True):
                tasks.create_task(ask(client, asked, answer))
            await until(lambda: all(answer.tokens for answer in answers))
            assert await post(served.clients[0], "/v1/unload_lora_adapter", {"lora_name": "sql"}) == 200
            await served.replace_scheduler()
        assert [answer.tokens for answer in answers] == [150, 150]
        async with asyncio.timeout(UNLOAD_AFTER_S + 10):
            while await post(served.clients[1], "/generate", body) != 404:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.1)


async def wait_without_scheduler(served: ProcessRouter, expected: ReadAnswer) -> None:
    """Requests wait for the next scheduler process, end in time, and are forgotten when their client leaves."""
    client = served.clients[0]
    stays, leaves, late, new = (ReadAnswer() for _ in range(4))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ask(client, mix(0, 150), stays))
        refused = ReadAnswer()
        leaving = tasks.create_task(ask(client, mix(0, 2000), leaves))
        timed = tasks.create_task(ask(client, mix(0, 2000), late, **{"x-request-timeout-ms": "1500"}))
        await until(lambda: all(answer.tokens for answer in (stays, leaves, late)))
        await served.kill_scheduler()
        tasks.create_task(ask(client, mix(0, 150), new))
        leaving.cancel()
        await ask(client, mix(0, 150), refused, **{"x-request-timeout-ms": "100"})
        assert (refused.status, new.tokens) == (408, 0)
        await timed  # without a scheduler process
        assert late.ends == [f"error: Request timed out: its time was over after {late.tokens} new tokens"]
        await served.start_scheduler()
    assert (stays, new) == (expected, expected)
    assert re.findall(r"requests submitted again.* requests=(\d+)", served.log(0))[-1:] == ["1"]


@pytest.mark.full
async def test_calls_to_a_scheduler_process_that_hangs_end(echo_model: Path, tmp_path: Path) -> None:
    """RpcPeer are about permits, rate limits and metrics. The launcher ends such a process; this one hangs for good."""
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nkey = "limited"\nrequests_per_minute = 100\n[[keys]]\nkey = "free"')
    body = {"inputs": "one two three", "parameters": {"max_new_tokens": 3}}

    async def status(client: aiohttp.ClientSession, method: str, path: str, key: str, **headers: str) -> int:
        headers |= {"authorization": f"Bearer {key}"}
        async with client.request(method, path, json=body, headers=headers) as response:
            return response.status

    async with router(echo_model, 2, f"--api-keys-file={keys}") as served:
        client, began = served.clients[0], time.monotonic()
        assert await status(client, "POST", "/generate", "limited") == 200
        served.scheduler.send_signal(signal.SIGSTOP)
        try:
            async with asyncio.TaskGroup() as tasks:
                asked = [
                    tasks.create_task(status(client, "POST", "/generate", "limited")),
                    tasks.create_task(status(client, "POST", "/generate", "free")),
                    tasks.create_task(status(client, "GET", "/metrics", "free")),
                    tasks.create_task(status(client, "POST", "/generate", "free", **{"x-request-timeout-ms": "500"})),
                ]
        finally:
            served.scheduler.send_signal(signal.SIGCONT)
        assert [task.result() for task in asked] == [503, 503, 503, 408]
        assert time.monotonic() - began < 1.5 * WITHOUT_LINK_S
        assert await status(client, "POST", "/generate", "limited") == 200


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
async def test_64_requests_survive_20_deaths_and_hangs_of_the_scheduler_process(
    tiny_model: Path, replicas: int
) -> None:
    limit_s = max(PAUSE_S, 3 * await load_s())
    async with router(tiny_model, 2, replicas=replicas, engine="torch") as served:
        expected = await Traffic(64, 250).run(served)
        assert all(answer.status == 200 and answer.texts for answer in expected)
        pauses = []
        for number in range(20):
            hang_s = 0.5 if number % 5 == 4 else 0.0
            pauses.append(await lose_scheduler(served, expected, 250, hang_s) - hang_s)
            await served.idle()
    median = statistics.median(pauses)
    print(f"{replicas} replicas: pause {median:.2f} s in the median, {max(pauses):.2f} s at most")
    assert median <= max(limit_s, 3 * await load_s())


def resident(served: ProcessRouter) -> dict[int, float]:
    """Resident memory of the scheduler process and of each worker in MiB, by process."""
    pids = [each.pid for each in (served.scheduler, *served.workers)]
    return {pid: psutil.Process(pid).memory_info().rss / 2**20 for pid in pids}


async def check_counts(served: ProcessRouter) -> None:
    """Each generation that was counted has succeeded or failed, once."""
    async with served.clients[0].get("/metrics") as response:
        lines = [line.rsplit(" ", 1) for line in (await response.text()).splitlines() if line[0] != "#"]
    counted = {name: float(value) for name, value in lines}
    failed = sum(value for name, value in counted.items() if name.startswith("tgi_request_failure"))
    assert counted["tgi_request_count"] == counted["tgi_request_success"] + failed


async def check_permits(served: ProcessRouter) -> None:
    """All permits are free: as many requests as there are permits run at once."""
    answers = [ReadAnswer() for _ in range(PERMITS)]
    async with asyncio.TaskGroup() as tasks:
        for number, answer in enumerate(answers):
            tasks.create_task(ask(served.clients[number % 4], mix(0, 500), answer))
    assert Counter(answer.status for answer in answers) == {200: PERMITS}


@pytest.mark.full
async def test_10000_random_ends_over_four_workers_leave_nothing(echo_model: Path) -> None:
    """Clients that leave, also from the queue, deadlines, stop strings, refusals, whole answers, deaths of a worker.

    Each request ends once.
    """
    draw = random.Random(1)
    ends: Counter[str] = Counter()
    replacing = asyncio.Lock()

    async def client(served: ProcessRouter, count: int) -> None:
        for _ in range(count):
            asked, answer = mix(draw.randrange(1000), draw.choice([0, 1, 5, 40])), ReadAnswer()
            headers = draw.choice([{}, {}, {"x-request-timeout-ms": str(draw.choice([1, 20, 60]))}])
            stays_s = draw.choice([None, None, draw.uniform(0, 0.1)])
            try:
                async with asyncio.timeout(stays_s):
                    await ask(draw.choice(served.clients[: 4 - replacing.locked()]), asked, answer, **headers)
            except TimeoutError:
                ends["left"] += 1
                continue
            most = 2 if asked.body.get("n") == 2 or asked.body.get("parameters", {}).get("best_of") == 2 else 1
            own = [end for end in answer.ends if not end.startswith(("Client", "Server"))]  # of the connection
            assert answer.ends, asked
            assert len(own) <= most, (asked, answer)
            ends[answer.ends[0].split(":")[0]] += 1
            if ends.total() % 900 == 0:
                async with replacing:
                    served.workers[3].kill()
                    await served.workers[3].wait()
                    await served.restart(3)

    async def clients(served: ProcessRouter, count: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(50):
                tasks.create_task(client(served, count // 50))
        await served.idle()
        await check_counts(served)

    flags = "--max-batch-size=16", f"--max-concurrent-requests={PERMITS}"
    async with router(echo_model, 4, *flags, step_ms=1) as served:
        await clients(served, 4000)
        before = resident(served)
        await clients(served, 6000)
        after = resident(served)
        await check_permits(served)
    growth = [after[pid] - before[pid] for pid in before if pid in after]
    print(f"ends: {dict(ends)}; growth of each process in MiB: {[round(each, 1) for each in growth]}")
    assert ends.total() == 10_000
    assert len(ends) > 4
    assert len(growth) == 4
    assert max(growth) < 16
