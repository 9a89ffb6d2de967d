"""Restart every shard of a running router in turn, under twelve streams.

Usage: python rolling_shards.py [--rounds 2] [--drain-timeout 0]. Bar: each text is right, and with a drain no request moves.
Printed: the longest gap between two tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import aiohttp
from servers import split, streaming_clients

SHARDS, STREAMS, NEW_TOKENS = 3, 12, 300


async def main() -> int:
    """Run the restarts; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--drain-timeout", type=float, default=0.0)
    options = parser.parse_args()
    flags = ("--echo-step-ms=10", f"--drain-timeout={options.drain_timeout}")
    async with split(SHARDS, shard_flags=flags) as server, aiohttp.ClientSession() as session:
        async with streaming_clients(session, server.url, STREAMS, NEW_TOKENS) as answers:
            await asyncio.sleep(1)
            for restart in range(options.rounds * SHARDS):
                await server.restart(restart % SHARDS)
        async with session.get(f"{server.url}/metrics") as response:
            lines = (await response.text()).splitlines()
    moves = next(float(line.split()[1]) for line in lines if line.startswith("text_generation_request_moves_total "))
    right = sum(answer.is_right(NEW_TOKENS) for answer in answers)
    longest = max(gap for answer in answers for gap in answer.gaps)
    print(
        f"drain {options.drain_timeout:g} s, {options.rounds * SHARDS} restarts: {right} of {len(answers)} answers right, "
        f"{moves:g} moves, longest gap {longest:.2f} s"
    )
    bad = right < len(answers) or (options.drain_timeout and moves)
    for answer in answers:
        if not answer.is_right(NEW_TOKENS):
            print(f"wrong: {answer.status} {answer.error} {len(answer.times)} tokens {str(answer.text)[:60]!r}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
