"""A flooding tenant beside a modest one: their service, and the cost of fairness.

Both have a fixed number of requests, and a fixed number of them in flight. Service (prompt tokens, counted at the first
token, and new tokens) is compared over the time in which both have requests waiting. Throughput is all work over its
total time, so that the mix of work is the same with and without fairness.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import aiohttp

from text_generation_bench.load.measures import quantile
from text_generation_bench.scheduling.client import client, complete, verdict
from text_generation_bench.scheduling.server import CpuUsage, serving
from text_generation_bench.simulator.measures import jain_index

JAIN_BAR = 0.95
COST_BAR = 0.03
RAMP_S = 1.0
RETRY_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--requests", type=int, default=200, help="of the modest tenant; the other has ten times as many"
    )
    parser.add_argument("--at-once", type=int, default=24, help="of the modest tenant; the other has ten times as many")
    parser.add_argument(
        "--prompt-tokens", type=int, default=100, help="of the modest tenant; the other's are 8 times as long"
    )
    parser.add_argument("--new-tokens", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--step-ms", type=float, default=10)
    parser.add_argument("--prefill-us", type=float, default=20)
    parser.add_argument("--decode-us", type=float, default=100)
    parser.add_argument("--flag", action="append", default=[], help="additional flag for the launcher")


@dataclass
class TenantLoad:
    """The requests of one tenant and their results."""

    name: str
    requests: int
    at_once: int
    prompt_tokens: int
    served: list[tuple[float, int]] = field(default_factory=list)
    rejected: int = 0
    first: list[float] = field(default_factory=list)
    last_first: float = 0.0
    """Time of the first token of its last request: until then it was backlogged."""

    def tokens(self, start: float, end: float) -> int:
        """Return the tokens served between two times."""
        return sum(tokens for at, tokens in self.served if start < at <= end)


async def tenants(arguments: argparse.Namespace) -> None:
    """Compare fairness with first come, first served; with permits for all requests, and with the default number."""
    print(
        f"{'':<28}{'small tok/s':>12}{'flood tok/s':>12}{'Jain':>8}{'tok/s':>9}{'s':>7}{'429s':>7}   TTFT p50 small, flood s"
    )
    roomy = arguments.at_once * 11 + 64
    fair = await measure(arguments, "two tenants", roomy, fair=True)
    plain = await measure(arguments, "one name for both", roomy, fair=False)
    few = await measure(arguments, "two tenants, 128 permits", 128, fair=True)
    few_plain = await measure(arguments, "one name, 128 permits", 128, fair=False)
    for name, (jain, rate), (_, plain_rate) in (("roomy", fair, plain), ("128 permits", few, few_plain)):
        cost = 1 - rate / plain_rate
        print(f"{name}: Jain {jain:.4f} (bar {JAIN_BAR:g}): {verdict(holds=jain >= JAIN_BAR)}")
        print(f"{name}: costs {cost:.2%} of throughput (bar {COST_BAR:.0%}): {verdict(holds=cost <= COST_BAR)}")


async def measure(arguments: argparse.Namespace, name: str, permits: int, *, fair: bool) -> tuple[float, float]:
    """Return Jain's index and the tokens per second of both tenants."""
    small = TenantLoad("small", arguments.requests, arguments.at_once, arguments.prompt_tokens)
    flood = TenantLoad("flood", arguments.requests * 10, arguments.at_once * 10, arguments.prompt_tokens * 8)
    flags = (
        "--engine=echo",
        f"--echo-step-ms={arguments.step_ms}",
        f"--echo-prefill-us={arguments.prefill_us}",
        f"--echo-decode-us={arguments.decode_us}",
        f"--max-batch-size={arguments.batch}",
        f"--max-concurrent-requests={permits}",
        "--max-queued-tokens=100000000",
        *arguments.flag,
    )
    async with serving(arguments.model, *flags) as server, client() as session:
        await complete(session, server.url, range(100, 150), 4)
        usage, started = CpuUsage(server), time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for tenant in (flood, small):
                requests = iter(range(tenant.requests))
                for number in range(tenant.at_once):
                    draw = random.Random(f"{tenant.name} {number}")
                    header = tenant.name if fair else "everybody"
                    tasks.create_task(
                        _send_all(session, server.url, TenantWork(tenant, header, arguments.new_tokens), requests, draw)
                    )
        ended, others = time.monotonic(), usage.line()
    until = min(small.last_first, flood.last_first)
    start = started + RAMP_S
    tokens = Counter({tenant.name: tenant.tokens(start, until) for tenant in (small, flood)})
    seconds = max(until - start, 1e-9)
    jain = jain_index(tokens.values()) or 0.0
    rate = sum(tenant.tokens(0, ended) for tenant in (small, flood)) / (ended - started)
    print(
        f"{name:<28}{tokens['small'] / seconds:12.0f}{tokens['flood'] / seconds:12.0f}{jain:8.4f}{rate:9.0f}"
        f"{ended - started:7.1f}{small.rejected + flood.rejected:7}   "
        f"{quantile(small.first, 0.5):.2f}, {quantile(flood.first, 0.5):.2f}; {others}",
        flush=True,
    )
    return jain, rate


@dataclass(frozen=True)
class TenantWork:
    """The work of one client of a tenant."""

    tenant: TenantLoad
    header: str
    new_tokens: int


async def _send_all(
    session: aiohttp.ClientSession, url: str, work: TenantWork, requests: Iterator[int], draw: random.Random
) -> None:
    tenant = work.tenant

    def served(tokens: int) -> None:
        tenant.served.append((time.monotonic(), tokens))

    for _ in requests:
        prompt = [draw.randrange(1000, 40000) for _ in range(tenant.prompt_tokens)]
        while True:
            answer = await complete(session, url, prompt, work.new_tokens, tenant=work.header, served=served)
            if answer.status != 429:
                break
            tenant.rejected += 1
            await asyncio.sleep(RETRY_S * draw.uniform(0.5, 1.5))
        if answer.error:
            raise RuntimeError(answer.error)
        tenant.first.append(answer.first)
        tenant.last_first = max(tenant.last_first, answer.times[0])
