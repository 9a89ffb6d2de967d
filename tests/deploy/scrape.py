"""Scrape /metrics of a router twenty times a second, as an endpoint picker does, under streams.

Usage: python scrape.py [--pairs 3] [--seconds 8]. Bar: the 99th percentile of the gaps between tokens grows by 2 ms at most.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys

import aiohttp
from servers import split, stream

STREAMS, STEP_MS = 16, 10
INTERVAL_S = 0.05
BAR_S = 0.002
SCRAPER = """
import http.client, sys, time
connection = http.client.HTTPConnection(sys.argv[1])
due = time.monotonic()
while True:
    began = time.monotonic()
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    assert response.status == 200 and len(response.read()) > 10_000
    print(time.monotonic() - began, flush=True)
    due = max(due + float(sys.argv[2]), time.monotonic())
    time.sleep(max(0.0, due - time.monotonic()))
"""
"""A process of its own: its work is not that of the clients."""


async def p99_gap_s(
    session: aiohttp.ClientSession, url: str, seconds: float, *, scraped: bool
) -> tuple[float, list[float]]:
    """Return the percentile of the gaps, and the seconds of each scrape."""
    scraper = None
    if scraped:
        host = url.removeprefix("http://")
        scraper = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SCRAPER, host, str(INTERVAL_S), stdout=asyncio.subprocess.PIPE
        )
    tokens = int(seconds * 1000 / STEP_MS)
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(stream(session, url, f"client {number} says ", tokens)) for number in range(STREAMS)
        ]
    times: list[float] = []
    if scraper is not None:
        scraper.kill()
        output, _ = await scraper.communicate()
        times = [float(line) for line in output.decode().splitlines()]
    gaps = sorted(itertools.chain.from_iterable(task.result().gaps[20:] for task in running))
    return gaps[int(len(gaps) * 0.99)], times


async def main() -> int:
    """Measure with and without scrapes, in turn; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    pairs, scrapes = [], list[float]()
    flags = ("--open-metrics",)
    async with (
        split(1, shard_flags=(f"--echo-step-ms={STEP_MS}",), router_flags=flags, environ={"API_KEY": "key"}) as server,
        aiohttp.ClientSession(headers={"authorization": "Bearer key"}) as session,
    ):
        for _ in range(options.pairs):
            alone, _ = await p99_gap_s(session, server.url, options.seconds, scraped=False)
            scraped, times = await p99_gap_s(session, server.url, options.seconds, scraped=True)
            pairs.append((alone, scraped))
            scrapes += times
    grown = statistics.median(scraped - alone for alone, scraped in pairs)
    text = ", ".join(f"{alone * 1e3:.1f} → {scraped * 1e3:.1f}" for alone, scraped in pairs)
    print(
        f"p99 gap without → with {1 / INTERVAL_S:.0f} scrapes/s: {text} ms; median growth {grown * 1e3:+.2f} ms; "
        f"{len(scrapes)} scrapes, median {statistics.median(scrapes) * 1e3:.1f} ms"
    )
    return 1 if grown > BAR_S else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
