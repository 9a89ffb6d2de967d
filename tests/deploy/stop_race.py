"""Stop a router and its shards at the same moment, again and again: each process must end. Printed: the slowest.

Usage: python stop_race.py [--rounds 200] [--at-once 1] [--seed 1]. The router streams to eight clients meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import random
import signal
import sys
import time

import aiohttp
from servers import Process, split, stream

HANGS_S = 20.0
"""A process that has not ended by then hangs."""
SHARDS, STREAMS = 2, 8


async def one_round(chance: random.Random) -> list[str]:
    """Stop all in any order, within milliseconds; return the problems."""
    async with split(SHARDS, shard_flags=("--echo-step-ms=2",)) as server, aiohttp.ClientSession() as session:
        async with asyncio.TaskGroup() as tasks:
            for number in range(STREAMS if chance.random() < 0.5 else 0):
                tasks.create_task(stream(session, server.url, f"stream {number} ", 20_000))
            await asyncio.sleep(chance.random() * 0.3)
            processes = {"router": server.router, **{f"shard {n}": each for n, each in enumerate(server.shards)}}
            order = chance.sample(sorted(processes), len(processes))
            began = time.monotonic()
            for name in order:
                processes[name].signal(signal.SIGTERM)
                if chance.random() < 0.5:
                    await asyncio.sleep(chance.random() * 0.02)
            ends = [tasks.create_task(_ended(name, processes[name], began)) for name in order]
        return [problem for end in ends if (problem := end.result())]


async def _ended(name: str, process: Process, began: float) -> str:
    try:
        async with asyncio.timeout(HANGS_S):
            code = await process.ended()
    except TimeoutError:
        process.signal(signal.SIGKILL)
        return f"{name} did not end: {[(each['event'], each.get('reason')) for each in process.records[-6:]]}"
    seconds = time.monotonic() - began
    slowest[name.split()[0]] = max(seconds, slowest.get(name.split()[0], 0.0))
    if code:
        return f"{name} ended with {code}: {process.records[-2:]}"
    return ""


slowest: dict[str, float] = {}


async def main() -> int:
    """Run the rounds; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    rounds = iter(range(options.rounds))
    problems: list[str] = []

    async def runner() -> None:
        for _ in rounds:
            problems.extend(await one_round(chance))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(options.at_once):
            tasks.create_task(runner())
    for problem in problems:
        print(problem)
    times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in sorted(slowest.items()))
    print(f"Python {platform.python_version()}: {options.rounds} rounds, {len(problems)} problems; slowest: {times}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
