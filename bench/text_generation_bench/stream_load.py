"""Closed-loop load on /v1/completions: a fixed number of greedy streams of exact length stays open. One row per level.

python -m text_generation_bench.stream_load --url http://127.0.0.1:3000 --conc 1 32 --isl 512 --osl 128

Prompts are random token ids. The streams are spread over processes, so that the client is not the bottleneck; the last
column is the processor share of the busiest process, and near 1.0 the client was the bottleneck.

    conc  streams          tok/s  new tokens per second        itl  ms between two events of a stream   errs    failed requests
    reqs  requests         ttft   ms to the first event        lat  duration of a request, in seconds   ev/tok  below 1: coalesced
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import time
from dataclasses import dataclass, field

import aiohttp

from text_generation_bench.scheduling.client import quantile

TIMEOUT_S = 900.0
WARM_UP_REQUESTS = 4


@dataclass
class StreamTimes:
    """Times of one request, in seconds: to its first event, between events, in total."""

    gaps: list[float] = field(default_factory=list)
    first: float | None = None
    seconds: float = 0.0
    events: int = 0
    tokens: int = 0
    error: str = ""


async def stream(session: aiohttp.ClientSession, options: argparse.Namespace, draw: random.Random) -> StreamTimes:
    """Stream one completion."""
    body = {
        "model": options.model,
        "prompt": [draw.randrange(200, options.vocab) for _ in range(options.isl)],
        "max_tokens": options.osl,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    answer, started = StreamTimes(), time.perf_counter()
    last = started
    try:
        async with session.post(f"{options.url}/v1/completions", json=body) as response:
            if response.status != 200:
                return StreamTimes(error=f"{response.status}: {(await response.text())[:200]}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter()
                if line.startswith(b'data: {"error"'):
                    return StreamTimes(error=line.decode()[:200])
                if b'"choices":[]' in line:
                    answer.tokens = json.loads(line[6:])["usage"]["completion_tokens"]
                    continue
                answer.events += 1
                if answer.first is None:
                    answer.first = now - started
                else:
                    answer.gaps.append(now - last)
                last = now
    except (aiohttp.ClientError, TimeoutError) as error:
        return StreamTimes(error=f"{type(error).__name__}: {error}")
    answer.seconds = time.perf_counter() - started
    return answer


async def _keep_open(options: argparse.Namespace, streams: int, requests: int, seed: int) -> list[StreamTimes]:
    draw, answers, left = random.Random(seed), list[StreamTimes](), iter(range(requests))
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def worker() -> None:
            for _ in left:
                answers.append(await stream(session, options, draw))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(streams):
                tasks.create_task(worker())
    return answers


def _client(work: tuple[argparse.Namespace, int, int, int]) -> tuple[list[StreamTimes], float]:
    """Run streams in a separate process; return their times and the process's processor share."""
    wall, busy = time.perf_counter(), time.process_time()
    answers = asyncio.run(_keep_open(*work))
    return answers, (time.process_time() - busy) / (time.perf_counter() - wall)


def measure(options: argparse.Namespace, streams: int) -> str:
    """Measure with `streams` open streams; return the row of the table."""
    processes, requests = min(options.procs, streams), max(streams * options.rounds, 2)
    shares = zip(_shares(streams, processes), _shares(requests, processes), strict=True)
    work = [(options, some, many, streams * 1000 + index) for index, (some, many) in enumerate(shares)]
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        started = time.perf_counter()
        parts = pool.map(_client, work, chunksize=1)
        seconds = time.perf_counter() - started
    answers = [answer for some, _ in parts for answer in some]
    good = [answer for answer in answers if not answer.error]
    first = [answer.first * 1e3 for answer in good if answer.first is not None]
    gaps = [gap * 1e3 for answer in good for gap in answer.gaps]
    tokens, events = sum(answer.tokens for answer in good), sum(answer.events for answer in good)
    row = (
        f"{streams:4d} {requests:4d} {tokens / seconds:8.1f} {quantile(first, 0.5):7.1f} {quantile(first, 0.99):7.1f} "
        f"{quantile(gaps, 0.5):7.2f} {quantile(gaps, 0.99):7.2f} {quantile([answer.seconds for answer in good], 0.5):6.2f} "
        f"{len(answers) - len(good):4d} {events / max(tokens, 1):6.2f} {max(busy for _, busy in parts):6.2f}"
    )
    errors = [answer.error for answer in answers if answer.error]
    return row + (f"\n     first error: {errors[0]}" if errors else "")


def _shares(total: int, parts: int) -> list[int]:
    return [total // parts + (index < total % parts) for index in range(parts)]


def main() -> None:
    """Warm up and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", default="tgi")
    parser.add_argument("--isl", type=int, default=512, help="prompt tokens")
    parser.add_argument("--osl", type=int, default=128, help="new tokens")
    parser.add_argument("--conc", type=int, nargs="+", default=[1, 32], help="numbers of open streams")
    parser.add_argument("--rounds", type=int, default=2, help="requests per stream")
    parser.add_argument("--vocab", type=int, default=49000)
    parser.add_argument("--procs", type=int, default=1)
    options = parser.parse_args()
    short = argparse.Namespace(**vars(options) | {"osl": 8})
    asyncio.run(_keep_open(short, WARM_UP_REQUESTS, WARM_UP_REQUESTS, 1))
    print("conc reqs    tok/s  ttft50  ttft99   itl50   itl99  lat50 errs ev/tok client")
    for streams in options.conc:
        print(measure(options, streams), flush=True)


if __name__ == "__main__":
    main()
