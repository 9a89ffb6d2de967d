"""The cost of mutual TLS between a router and its shards: CPU time of both for a report, with TLS and without.

Usage: python shard_tls.py [--pairs 3]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
from pathlib import Path

import aiohttp
from servers import split, stream, tls_arguments, write_certificates

COST_STREAMS, COST_TOKENS, STEP_MS = 32, 1000, 5


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


async def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3, help="runs with and without TLS, in turn")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="t-") as name:
        folder = Path(name, "tls")
        access = write_certificates(folder, token="token-of-this-run")
        costs = []
        for _ in range(options.pairs):
            plain = await cpu_s_per_report((), access.environ)
            costs.append((plain, await cpu_s_per_report(tls_arguments(access), access.environ)))
        ratio = statistics.median(tls / plain for plain, tls in costs)
    text = ", ".join(f"{plain * 1e6:.0f} → {tls * 1e6:.0f}" for plain, tls in costs)
    print(f"CPU a report of {COST_STREAMS} tokens, plain → TLS: {text} µs; median ratio {ratio:.3f}")


if __name__ == "__main__":
    asyncio.run(main())
