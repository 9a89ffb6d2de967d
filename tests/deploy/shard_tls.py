"""Mutual TLS between a router and its shards: certificates that change under streams, and the cost.

Usage: python shard_tls.py [--pairs 3]. Bar: no stream fails while the CA and all certificates are replaced and each shard
restarts. Printed: the CPU time of router and shard for a report, with TLS and without.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from pathlib import Path

import aiohttp
from servers import split, stream, streaming_clients, tls_arguments, write_certificates

from text_generation_common.shard_access import ShardAccess

STREAMS, NEW_TOKENS = 8, 300
COST_STREAMS, COST_TOKENS, STEP_MS = 32, 1000, 5


async def rotate(access: ShardAccess, folder: Path) -> str:
    """Replace the certificates under streams, and restart the shards; return the problem."""
    flags = tls_arguments(access)
    async with (
        split(
            2, shard_flags=("--echo-step-ms=10", *flags), router_flags=flags, tcp=True, environ=access.environ
        ) as server,
        aiohttp.ClientSession() as session,
        streaming_clients(session, server.url, STREAMS, NEW_TOKENS) as answers,
    ):
        for shard in (0, 1, 0):
            await asyncio.sleep(1)
            await asyncio.to_thread(write_certificates, folder)
            await server.restart(shard)
    wrong = [answer for answer in answers if not answer.is_right(NEW_TOKENS)]
    print(f"3 new CAs, 3 restarts: {len(wrong)} of {len(answers)} streams failed")
    return "; ".join(answer.error or "a wrong text" for answer in wrong)


async def cpu_s_per_report(flags: tuple[str, ...], environ: dict[str, str]) -> float:
    """Return the CPU seconds of router and shard per report, over one load."""
    shard_flags = (f"--echo-step-ms={STEP_MS}", *flags)
    async with (
        split(1, shard_flags=shard_flags, router_flags=flags, tcp=True, environ=environ) as server,
        aiohttp.ClientSession() as session,
    ):
        pids = (server.router.pid, server.shards[0].pid)
        await stream(session, server.url, "warm up ", 50)
        before, began = sum(map(_cpu_s, pids)), await _reports(session, server.url)
        async with asyncio.TaskGroup() as tasks:
            for number in range(COST_STREAMS):
                tasks.create_task(stream(session, server.url, f"client {number} says ", COST_TOKENS))
        return (sum(map(_cpu_s, pids)) - before) / (await _reports(session, server.url) - began)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _reports(session: aiohttp.ClientSession, url: str) -> float:
    async with session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith("tgi_batch_inference_count{"))


async def main() -> int:
    """Run both; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3, help="runs with and without TLS, in turn")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="t-") as name:
        folder = Path(name, "tls")
        access = write_certificates(folder, token="token-of-this-run")
        problem = await rotate(access, folder)
        costs = []
        for _ in range(options.pairs):
            plain = await cpu_s_per_report((), access.environ)
            costs.append((plain, await cpu_s_per_report(tls_arguments(access), access.environ)))
        ratio = statistics.median(tls / plain for plain, tls in costs)
    text = ", ".join(f"{plain * 1e6:.0f} → {tls * 1e6:.0f}" for plain, tls in costs)
    print(f"CPU a report of {COST_STREAMS} tokens, plain → TLS: {text} µs; median ratio {ratio:.3f}")
    if problem:
        print(problem)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
