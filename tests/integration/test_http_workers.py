"""Several HTTP workers look like one server: metrics, dashboard, limits. All are processes of their own."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import orjson
import pytest
import pytest_asyncio
from router_workers import READY_S, ProcessRouter, router

from text_generation_proto.worker_link import worker_link_pb2 as pb
from text_generation_router.worker_link.link import LENGTH

T = TypeVar("T")
GAUGES = (
    *("tgi_queue_size", "tgi_batch_current_size", "tgi_batch_total_tokens", "text_generation_connections"),
    *("text_generation_preparation_characters", "text_generation_queued_tokens"),
)
KEYS = """
[[keys]]
key = "sk-operator"
tenant = "operator"
trust_headers = true
[[keys]]
key = "sk-limited"
tenant = "limited"
requests_per_minute = 10
[[keys]]
key = "sk-tokens"
tenant = "tokens"
tokens_per_minute = 60
"""
OPERATOR, LIMITED, TOKENS = ({"authorization": f"Bearer sk-{name}"} for name in ("operator", "limited", "tokens"))
BODY = {"inputs": "one two three four", "parameters": {"max_new_tokens": 6}}
WITHOUT_GRAMMARS = "--disable-grammar-support"
"""No process that compiles them is started."""


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text(KEYS)
    return file


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(echo_model: Path, keys_file: Path) -> AsyncIterator[ProcessRouter]:
    flags = f"--api-keys-file={keys_file}", "--metric-names=vllm,trtllm", "--max-connections=12", WITHOUT_GRAMMARS
    async with router(echo_model, 2, *flags) as started:
        yield started


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def all_of(calls: Iterable[Coroutine[None, None, T]]) -> list[T]:
    """Run calls at once, and return their results."""
    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(call) for call in calls]
    return [task.result() for task in started]


async def generate(client: aiohttp.ClientSession, headers: dict[str, str], **parameters: int) -> int:
    body = {**BODY, "parameters": {**BODY["parameters"], **parameters}}  # type: ignore[dict-item]
    async with client.post("/generate", json=body, headers=headers | {"connection": "close"}) as response:
        await response.read()
        return response.status


async def scrape(client: aiohttp.ClientSession, accept: str = "text/plain") -> dict[str, float]:
    """The value of each series, by its name with labels."""
    headers = OPERATOR | {"accept": accept, "connection": "close"}
    async with client.get("/metrics", headers=headers) as response:
        assert response.status == 200
        lines = [line.partition(" # ")[0] for line in (await response.text()).splitlines() if line[0] != "#"]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


@asynccontextmanager
async def watching(client: aiohttp.ClientSession) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """The samples of a dashboard."""
    async with client.get("/dashboard/events", headers=OPERATOR) as response:

        async def read() -> AsyncIterator[dict[str, Any]]:
            while True:
                name, data, _ = [await response.content.readline() for _ in range(3)]
                if name == b"event: sample\n":
                    yield orjson.loads(data.removeprefix(b"data: "))

        yield read()


async def samples(client: aiohttp.ClientSession, count: int) -> list[dict[str, Any]]:
    """The first samples of a dashboard."""
    async with watching(client) as shown:
        return [await anext(shown) for _ in range(count)]


async def idle(client: aiohttp.ClientSession) -> dict[str, float]:
    """The metrics once nothing runs and no other connection is open."""
    async with asyncio.timeout(READY_S):
        while True:
            seen = await scrape(client)
            if not sum(seen[name] for name in GAUGES) - 1:  # that of the scrape
                return seen
            await asyncio.sleep(0.05)


async def test_every_worker_shows_the_sums_of_all(served: ProcessRouter) -> None:
    before = await idle(served.clients[0])
    assert await all_of(generate(served.clients[number > 2], OPERATOR) for number in range(8)) == [200] * 8
    assert await generate(served.clients[1], OPERATOR, max_new_tokens=0) == 422
    shown = [await idle(client) for client in served.clients]
    changing = ("busy_ratio", "queue_seconds", '{route="/metrics",status="200"}')
    first = {name: value for name, value in shown[0].items() if not name.endswith(changing)}
    assert first == {name: shown[1][name] for name in first}
    assert shown[0].keys() == shown[1].keys() >= before.keys()
    grown = {name: value - before.get(name, 0) for name, value in shown[0].items()}
    answered = [
        grown[f'text_generation_http_requests_total{{route="/generate",status="{each}"}}'] for each in (200, 422)
    ]
    assert answered == [8, 1]
    assert grown["tgi_request_count"] == grown['tgi_request_input_length_bucket{le="+Inf"}'] + 1 == 9
    assert grown['text_generation_requests_finished_total{reason="length"}'] == grown["tgi_request_success"] == 8
    assert grown['tgi_request_failure{err="validation"}'] == 1
    assert grown["text_generation_generated_tokens_total"] == grown["tgi_request_generated_tokens_sum"] == 48
    labels = '{model_name="' + str(served.model) + '",engine="0"}'
    assert grown[f"vllm:generation_tokens_total{labels}"] == 48
    assert grown[f"vllm:time_to_first_token_seconds_count{labels}"] == 8
    openmetrics = [await scrape(client, "application/openmetrics-text") for client in served.clients]
    assert (
        openmetrics[0]["tgi_request_success"]
        == openmetrics[1]["tgi_request_success"]
        == shown[0]["tgi_request_success"]
    )


async def test_counts_of_workers_are_summed_again_by_the_next_scheduler_process(served: ProcessRouter) -> None:
    before = await idle(served.clients[0])
    async with watching(served.clients[0]) as shown:
        first = await anext(shown)
        await served.restart_scheduler()
        names = "tgi_request_count", "tgi_request_success", 'tgi_request_duration_bucket{le="+Inf"}'
        async with asyncio.timeout(READY_S):  # a worker counts from its connection to the new process on
            after = await scrape(served.clients[1])
            while [after[name] for name in names] != [before[name] for name in names]:
                after = await scrape(served.clients[1])
        assert (await anext(shown))["now"] > first["now"], "the dashboard goes on"
    assert after["text_generation_generated_tokens_total"] == 0
    assert await generate(served.clients[0], OPERATOR) == 200


async def test_counts_outlive_a_worker_and_its_gauges_do_not(served: ProcessRouter) -> None:
    before = await idle(served.clients[0])
    assert [await generate(served.clients[1], OPERATOR) for _ in range(4)] == [200] * 4
    async with AsyncExitStack() as running:
        body = {**BODY, "parameters": {"max_new_tokens": 4000}}
        for _ in range(2):
            post = served.clients[1].post("/generate_stream", json=body, headers=OPERATOR)
            await running.enter_async_context(post)
        async with asyncio.timeout(READY_S):
            while (counted := await scrape(served.clients[0]))["text_generation_connections"] != 3:  # noqa: ASYNC110
                await asyncio.sleep(0.02)  # connections of the requests before close
        assert counted["tgi_batch_current_size"] == 2
        served.workers[1].kill()
        await served.workers[1].wait()
    shown = await idle(served.clients[0])
    for seen in (counted, shown):
        assert seen["tgi_request_success"] - before["tgi_request_success"] == 4
        assert seen["tgi_request_count"] - before["tgi_request_count"] == 6
    await served.restart(1)
    assert await generate(served.clients[1], OPERATOR) == 200
    again = await idle(served.clients[1])
    assert again["tgi_request_success"] - shown["tgi_request_success"] == 1
    failed = sum(value for name, value in again.items() if name.startswith("tgi_request_failure"))
    assert again["tgi_request_count"] == again["tgi_request_success"] + failed
    rising = [name for name in again if name.partition("{")[0].endswith(("_total", "_count", "_bucket", "_success"))]
    assert not [name for name in rising if again[name] < shown[name]]


async def test_a_worker_that_does_not_answer_counts_with_its_last_figures(served: ProcessRouter) -> None:
    assert await generate(served.clients[1], OPERATOR) == 200
    before = await idle(served.clients[0])
    served.workers[1].send_signal(signal.SIGSTOP)
    try:
        loop = asyncio.get_running_loop()
        began = loop.time()
        seen = [await scrape(served.clients[0]) for _ in range(5)]
        assert loop.time() - began < 4, "each scrape waits for the worker"
        assert {each["tgi_request_success"] for each in seen} == {before["tgi_request_success"]}
    finally:
        served.workers[1].send_signal(signal.SIGCONT)
    assert await generate(served.clients[1], OPERATOR) == 200
    assert (await idle(served.clients[0]))["tgi_request_success"] == before["tgi_request_success"] + 1


@pytest.mark.parametrize(
    "nonsense", [b'[1,{"unknown":1},[]]', b'[1,{"text_generation_http_requests_total":{"/":1}},[]]']
)
async def test_counts_that_make_no_sense_end_their_connection(served: ProcessRouter, nonsense: bytes) -> None:
    before = await idle(served.clients[0])
    reader, writer = await asyncio.open_unix_connection(served.socket)

    def send(message: pb.FromWorker) -> None:
        writer.write(LENGTH.pack(message.ByteSize()) + message.SerializeToString())

    send(pb.FromWorker(hello=pb.Hello(worker=9)))
    async with asyncio.timeout(READY_S):
        while True:
            got = pb.FromScheduler.FromString(await reader.readexactly(*LENGTH.unpack(await reader.readexactly(4))))
            if got.HasField("call"):
                break
        send(pb.FromWorker(reply=pb.Reply(number=got.call.number, body=nonsense)))
        while await reader.read(1 << 16):
            pass
    writer.close()
    own = {'text_generation_http_requests_total{route="/metrics",status="200"}'}
    assert (await idle(served.clients[0])).keys() - own == before.keys() - own
    assert "Traceback" not in served.log()


async def test_all_dashboards_show_the_same_samples_of_all(served: ProcessRouter) -> None:
    for client in served.clients:
        assert await generate(client, OPERATOR, max_new_tokens=0) == 422
    before = await idle(served.clients[0])
    shown = await all_of(samples(client, 4) for client in (*served.clients, served.clients[0]))
    by_time = [{sample["now"]: sample for sample in viewer} for viewer in shown]
    times = sorted(set.intersection(*(set(viewer) for viewer in by_time)))
    assert len(times) >= 2, "each has its own samples"
    assert all(viewer[now] == by_time[0][now] for viewer in by_time for now in times)
    sample = by_time[0][times[-1]]
    assert sample["connections"] == 3
    assert sample["ended"]["length"] == before['text_generation_requests_finished_total{reason="length"}']
    [error] = [error for error in sample["errors"] if error["route"] == "/generate"]
    assert (error["count"] >= 2, error["status"], error["tenants"]) == (True, 422, ["operator"])


async def test_rate_limits_are_those_of_all_workers_and_a_reload_keeps_them(
    served: ProcessRouter, keys_file: Path
) -> None:
    statuses, began = [], time.monotonic()
    for _ in range(3):
        statuses += await all_of(generate(served.clients[number % 2], LIMITED) for number in range(10))
    assert 10 <= statuses.count(200) <= 10 + int((time.monotonic() - began) / 6), "one more every six seconds"
    assert statuses.count(429) == 30 - statuses.count(200)
    changed = KEYS.replace('tenant = "limited"', 'tenant = "renamed"').replace('"sk-tokens"', '"sk-new"')
    await asyncio.to_thread(keys_file.write_text, changed)
    for process in (served.scheduler, *served.workers):  # as the launcher does
        process.send_signal(signal.SIGHUP)
    for client in served.clients:
        async with asyncio.timeout(READY_S):
            while await generate(client, TOKENS) != 401:  # noqa: ASYNC110 - no event: in another process
                await asyncio.sleep(0.02)
        statuses += [await generate(client, LIMITED) for _ in range(4)]
        async with client.post("/generate", json=BODY, headers=LIMITED) as response:
            statuses.append(response.status)
            if response.status == 429:
                assert (await response.json())["error_type"] == "overloaded"
                assert 1 <= int(response.headers["retry-after"]) <= 6
    assert 10 <= statuses.count(200) <= 10 + int((time.monotonic() - began) / 6), "none is allowed anew"
    statuses = [await generate(served.clients[number % 2], {"authorization": "Bearer sk-new"}) for number in range(10)]
    assert statuses == [200] * statuses.count(200) + [429] * statuses.count(429)
    assert 3 <= statuses.count(200) <= 7, "each takes 10 of 60 tokens, and the last of them are paid afterwards"


async def test_each_worker_has_an_equal_part_of_the_limit_of_connections(served: ProcessRouter) -> None:
    await idle(served.clients[0])
    request = b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    request += b"authorization: Bearer sk-operator\r\ncontent-length: 14\r\n\r\n"
    connections = []
    for number in range(8):
        reader, writer = await asyncio.open_connection("127.0.0.1", served.ports[1])
        connections.append((reader, writer))
        writer.write(request)  # its body does not follow yet
        async with asyncio.timeout(READY_S):
            while (await scrape(served.clients[0]))["text_generation_connections"] < number + 2:
                pass
    for _, writer in connections:
        writer.write(b'{"inputs":"a"}')
    statuses = [int((await reader.readline()).split()[1]) for reader, _ in connections]
    assert statuses == [200] * 6 + [503] * 2
    for _, writer in connections:
        writer.close()
