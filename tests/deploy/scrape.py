"""Scrape /metrics of a router twenty times a second, as an endpoint picker does, under streams.

Usage: python scrape.py [--seconds 40]. Bar: each scrape is answered. Printed: the 99th percentile of the gaps between
tokens, with scrapes and without.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import itertools
import signal
import statistics
import sys
import time

import aiohttp
from servers import split, stream

STREAMS, STEP_MS = 16, 10
INTERVAL_S = 0.05
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


def p99(gaps: list[float]) -> float:
    """Return the 99th percentile."""
    return sorted(gaps)[int(len(gaps) * 0.99)]


async def main() -> int:
    """Measure with and without scrapes, second by second in turn; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=40)
    options = parser.parse_args()
    alone, scraped = list[float](), list[float]()
    switches: list[float] = []
    async with (
        split(
            1,
            shard_flags=(f"--echo-step-ms={STEP_MS}",),
            router_flags=("--open-metrics",),
            environ={"API_KEY": "key"},
        ) as server,
        aiohttp.ClientSession(headers={"authorization": "Bearer key"}) as session,
    ):
        host = server.url.removeprefix("http://")
        scraper = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SCRAPER, host, str(INTERVAL_S), stdout=asyncio.subprocess.PIPE
        )
        tokens = int((options.seconds + 4) * 1000 / STEP_MS)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(stream(session, server.url, f"client {number} says ", tokens))
                for number in range(STREAMS)
            ]
            await asyncio.sleep(2)
            for second in range(options.seconds):
                scraper.send_signal(signal.SIGCONT if second % 2 else signal.SIGSTOP)
                switches.append(time.monotonic())
                await asyncio.sleep(1)
        scraper.kill()
        output, _ = await scraper.communicate()
    scrapes = [float(line) for line in output.decode().splitlines()]
    for answer in (task.result() for task in running):
        for before, after in itertools.pairwise(answer.times):
            if (second := bisect.bisect(switches, before) - 1) >= 0 and after - switches[second] < 1:
                (scraped if second % 2 else alone).append(after - before)
    grown = p99(scraped) - p99(alone)
    print(
        f"p99 gap without → with {1 / INTERVAL_S:.0f} scrapes/s: {p99(alone) * 1e3:.1f} → {p99(scraped) * 1e3:.1f} ms "
        f"({grown * 1e3:+.2f} ms); {len(scrapes)} scrapes, median {statistics.median(scrapes) * 1e3:.1f} ms"
    )
    return 0 if scrapes else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
