"""Measure the overhead of the router with the echo engine: `make bench-router`.

Starts a shard (echo, 20 ms per step) and a router on 127.0.0.1 and loads them from another process. The router's
processor time comes from /proc, so that other programs do not affect it.

    streamed token   128 streams of 200 tokens; CPU time of the router, divided by the number of tokens
    chat             the same as chats, with template
    smg, vllm-router the same chats through these gateways in front of a mock worker (gateways.py), where they are installed:
                     proxies, which neither tokenize nor schedule. All of these take turns; the medians are printed, and
                     the router's divided by a gateway's
    workers          the same loads through --workers HTTP workers and their scheduler process; CPU time of all of them
    request          requests with 100 prompt tokens and 1 new token, 8 at a time, on kept connections and on new ones
    burst            2,000 such requests at once beside 64 streams: the longest gap between two tokens of a stream beyond the
                     step, as a client beside the router sees it; median and last time to first token of the burst
    added TTFT       median time to first token through the router, minus the median directly from the shard
    decision         one Scheduler.schedule with 256 running sequences; recording is one update
    helpers          the processes that render templates and prove grammars
    socket write     writing 150 bytes to a sleeping reader: a lower bound of the first result. It varies from day to day,
                     and everything else with it
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import selectors
import socket
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import orjson
import psutil

from text_generation_bench.gateways import MODEL, gateways
from text_generation_bench.load.dialects import PATHS, AnswerStream
from text_generation_bench.load.http_client import HttpClient
from text_generation_bench.router_processes import cpu_seconds, servers, terminate_process, workers
from text_generation_proto.client import ShardClient
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.request import Request, RequestId
from text_generation_router.scheduling.messages import ReplicaSpec, StepOutput
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.scheduler import Scheduler

STEP_MS = 20.0
STREAMS = 128
TOKENS_A_STREAM = 200
REQUESTS = 2000
TIMEOUT_S = 120.0
T = TypeVar("T")
Load = Callable[[int, int], Awaitable[float]]
"""Loads a port with streams of so many tokens."""
CLOSE = {"Connection": "close"}
PROMPT = "word " * 99 + "end"
"""About 100 tokens."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path, help="folder with a tokenizer.json")
    parser.add_argument("--gateways", default=Path(), type=Path, help="folder with the commands smg and vllm-router")
    parser.add_argument("--rounds", default=5, type=int, help="turns of the streamed loads")
    parser.add_argument("--workers", default=2, type=int, help="HTTP workers to measure beside the router; 0: none")
    arguments = parser.parse_args()
    model = arguments.model
    print("quantity                            measured   budget")
    with ExitStack() as running:
        router, port, _ = running.enter_context(servers(model, step_ms=STEP_MS))
        others = dict(running.enter_context(gateways(arguments.gateways, STEP_MS)))
        routers: dict[str, tuple[Sequence[int], int]] = {"": ([router], port)}
        if arguments.workers:
            routers[f" ({arguments.workers} workers)"] = running.enter_context(
                workers(model, STEP_MS, arguments.workers)
            )
        token_costs(routers, others, arguments.rounds)
        burst(port)
        row("resident memory", psutil.Process(router).memory_info().rss / 1e6, 200, "MB")
        # PSS divides shared pages between processes, so the sum is their total memory.
        helpers = sum(child.memory_full_info().pss for child in psutil.Process(router).children())
        row("(its helpers)", helpers / 1e6, float("inf"), "MB")
    with servers(model, step_ms=0) as (router, port, address):
        for name, headers in (("CPU per request, 100 prompt tokens", {}), ("(each on its own connection)", CLOSE)):
            in_child(request_load, port, 200, headers)
            before = cpu_seconds(router)
            in_child(request_load, port, REQUESTS, headers)
            row(name, (cpu_seconds(router) - before) / REQUESTS * 1e3, 1, "ms")
        through = in_child(time_to_first_token, port, 300)
        terminate_process(router)
        direct = in_child(direct_time_to_first_token, address, 300)
        row("added time to first token, p50", (through - direct) * 1e3, 3, "ms")
    apply_us, decide_us = scheduler_cost()
    row("(scheduler, recording a step of 256)", apply_us, float("inf"), "us")
    row("scheduler, one decision at 256 running", decide_us, 100, "us")
    row("(a bare socket write)", socket_write_cost(), float("inf"), "us")


def token_costs(
    routers: Mapping[str, tuple[Sequence[int], int]], others: Mapping[str, tuple[int, int]], rounds: int
) -> None:
    """Print the processor time of a streamed token: of routers and of gateways with these process ids and ports.

    The first router is the one that the others are compared with.
    """
    ours = {"streamed token, 128 streams": (stream_load, 20.0), "token of 128 streamed chats": (chat_load, 30.0)}
    subjects: list[tuple[str, Sequence[int], int, Load]] = [
        (name + suffix, pids, port, load)
        for suffix, (pids, port) in routers.items()
        for name, (load, _) in ours.items()
    ]
    subjects += [(name, [pid], other, chat_load) for name, (pid, other) in others.items()]
    costs: dict[str, list[float]] = {name: [] for name, *_ in subjects}
    for _, _, where, load in subjects:
        in_child(load, where, 20)
    for number in range(rounds):
        for name, pids, where, load in subjects[:: 1 if number % 2 else -1]:
            before = sum(map(cpu_seconds, pids))
            in_child(load, where, TOKENS_A_STREAM)
            costs[name].append((sum(map(cpu_seconds, pids)) - before) / (STREAMS * TOKENS_A_STREAM) * 1e6)

    def compare(name: str, other: str) -> None:
        ratios = [mine / theirs for mine, theirs in zip(costs[name], costs[other], strict=True)]
        row(f"  {name} : {other}", statistics.median(ratios), float("inf"), "")

    for name, (_, budget) in ours.items():
        row(f"CPU per {name}", statistics.median(costs[name]), budget, "us")
        for suffix in list(routers)[1:]:
            row(f"CPU per {name}{suffix}", statistics.median(costs[name + suffix]), float("inf"), "us")
            compare(name + suffix, name)
    for other in others:
        row(f"(CPU per token of {other})", statistics.median(costs[other]), float("inf"), "us")
        for name in ours:
            compare(name, other)


def burst(port: int) -> None:
    """Print the longest gap of running streams while REQUESTS requests arrive at once, and the times to their first tokens."""
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        gap = pool.apply_async(_run, (longest_gap, (port, 400)))
        time.sleep(2)  # the streams run
        first, last = pool.apply(_run, (burst_load, (port, REQUESTS)))
        row("longest gap while 2,000 requests come", gap.get() * 1e3 - STEP_MS, 50, "ms")
    row("(their time to first token, p50)", first * 1e3, float("inf"), "ms")
    row("(their time to first token, longest)", last * 1e3, float("inf"), "ms")


def row(name: str, value: float, budget: float, unit: str) -> None:
    """Print one line of the table."""
    print(f"{name:<36}{value:8.2f} {unit:<3} {_budget(value, budget, unit)}", flush=True)


def _budget(value: float, budget: float, unit: str) -> str:
    if budget == float("inf"):
        return ""
    return f"{budget:>4g} {unit}{'' if value <= budget else '   OVER'}"


def in_child(work: Callable[..., Awaitable[T]], *arguments: object) -> T:
    """Run an async function in another process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        result: T = pool.apply(_run, (work, arguments))
    return result


def _run(work: Callable[..., Awaitable[T]], arguments: tuple[object, ...]) -> T:
    async def call() -> T:
        return await work(*arguments)

    return asyncio.run(call())


async def stream_load(port: int, tokens: int) -> float:
    """Run 128 streams at once to their end."""
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": tokens}}
    for answer in await _streams(port, "tgi", [body] * STREAMS, open_=STREAMS):
        assert len(answer.times) == tokens, f"{len(answer.times)} events instead of {tokens}"
    return 0.0


async def chat_load(port: int, tokens: int) -> float:
    """Run 128 chats at once. Special tokens of the echoed prompt have no text: of the first 20 tokens two are special."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": tokens,
        "stream": True,
    }
    for answer in await _streams(port, "openai-chat", [body] * STREAMS, open_=STREAMS):
        assert len(answer.times) > 0.85 * tokens, f"{len(answer.times)} events for {tokens} tokens"
    return 0.0


async def request_load(port: int, count: int, headers: Mapping[str, str]) -> float:
    """Send `count` short requests, 8 at a time."""
    body = orjson.dumps({"inputs": PROMPT, "parameters": {"max_new_tokens": 1}})
    client, left = _client(port, headers), iter(range(count))

    async def worker() -> None:
        for _ in left:
            response = await client.post("/generate", body, lambda stamp, part: None)
            assert response.status == 200, response.error_body[:200]

    async with asyncio.TaskGroup() as tasks:
        for _ in range(8):
            tasks.create_task(worker())
    return 0.0


async def longest_gap(port: int, tokens: int) -> float:
    """Return the longest time between two tokens of one of 64 streams, in seconds."""
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": tokens}}
    answers = await _streams(port, "tgi", [body] * 64, open_=64)
    return max(after - before for answer in answers for before, after in pairwise(answer.times))


async def burst_load(port: int, count: int) -> tuple[float, float]:
    """Send `count` short requests at once; return the median and the longest time to first token, in seconds."""
    os.nice(10)  # on a small machine it would take the processor from the streams' client
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 1}}
    started = time.perf_counter()
    answers = await _streams(port, "tgi", [body] * count, open_=count)
    times = [answer.times[0] - started for answer in answers]
    return statistics.median(times), max(times)


async def time_to_first_token(port: int, count: int) -> float:
    """Return the median seconds from a request to its first event, one request at a time."""
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 2}}
    times = []
    for _ in range(count):
        started = time.perf_counter()
        (answer,) = await _streams(port, "tgi", [body], open_=1)
        times.append(answer.times[0] - started)
    return statistics.median(times)


async def direct_time_to_first_token(address: str, count: int) -> float:
    """Return the median time to first token directly from the shard, in seconds."""
    sequence = pb.NewSequence(
        prompt=range(100),
        blocks=range(7),
        sampling=pb.Sampling(greedy=True),
        stopping=pb.Stopping(max_new_tokens=2),
    )
    times = []
    async with ShardClient.connect(address) as shard:
        await shard.warm_up()
        call = shard.run()
        for number in range(1, count + 1):
            started = time.perf_counter()
            await call.write(pb.Orders(number=number, placements=[sequence], prefill_slots=[0], prefill_tokens=[100]))
            while isinstance(report := await call.read(), pb.StepReport) and not report.finished:
                if report.slots:
                    times.append(time.perf_counter() - started)
        call.cancel()
    return statistics.median(times)


def scheduler_cost(running: int = 256, steps: int = 2000) -> tuple[float, float]:
    """Return the microseconds of one apply and one decide with `running` decoding sequences."""
    scheduler = Scheduler(Policy(1 << 20, running))
    scheduler.open(0, ReplicaSpec(num_slots=running, num_blocks=1 << 17, block_size=16))
    for number in range(running):
        scheduler.submit(Request(RequestId(number), tuple(range(100 + number % 16)), steps + 10), 0.0)
    scheduler.dispatch()
    scheduler.schedule(0)
    applied = 1
    spent = [0.0, 0.0]
    for _ in range(steps):
        outcome = StepOutput(applied, list(range(running)), [], [7] * running, step_s=0.01)
        started = time.perf_counter()
        scheduler.update(0, outcome, 0.0)
        between = time.perf_counter()
        scheduler.dispatch()
        if orders := scheduler.schedule(0):
            applied = orders.number
        spent[0] += between - started
        spent[1] += time.perf_counter() - between
    return spent[0] / steps * 1e6, spent[1] / steps * 1e6


def socket_write_cost(bursts: int = 100, writes: int = 128) -> float:
    """Return the processor time of one small write, in microseconds, in bursts 20 ms apart as in the router."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        reader = multiprocessing.get_context("spawn").Process(target=_read_all, args=(server.getsockname()[1], writes))
        reader.start()
        connections = [server.accept()[0] for _ in range(writes)]
    spent = 0.0
    for _ in range(bursts):
        started = time.process_time()
        for connection in connections:
            connection.send(b"x" * 150)
        spent += time.process_time() - started
        time.sleep(STEP_MS / 1e3)
    for connection in connections:
        connection.close()
    reader.join()
    return spent / (bursts * writes) * 1e6


def _read_all(port: int, connections: int) -> None:
    with selectors.DefaultSelector() as selector:
        for _ in range(connections):
            selector.register(socket.create_connection(("127.0.0.1", port)), selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                reader = key.fileobj
                assert isinstance(reader, socket.socket)
                if not reader.recv(1 << 16):
                    selector.unregister(reader)
                    reader.close()


async def _streams(port: int, dialect: str, bodies: Sequence[object], open_: int) -> list[AnswerStream]:
    """Stream answers, `open_` at a time."""
    client, left = _client(port), iter(bodies)
    answers: list[AnswerStream] = []

    async def worker() -> None:
        for body in left:
            answer = AnswerStream(dialect, wants_text=False)
            response = await client.post(PATHS[dialect], orjson.dumps(body), answer.feed)
            assert response.status == 200, response.error_body[:200]
            assert answer.has_ended, answer.error
            answers.append(answer)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(open_):
            tasks.create_task(worker())
    return answers


def _client(port: int, headers: Mapping[str, str] = CLOSE) -> HttpClient:
    """Return a client, by default with a connection for each request."""
    return HttpClient(f"http://127.0.0.1:{port}", headers, None, TIMEOUT_S)


if __name__ == "__main__":
    os.environ.pop("PYTHONASYNCIODEBUG", None)
    main()
