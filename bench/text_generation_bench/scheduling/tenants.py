"""Two tenants, one of which floods: who is served, and what fairness costs.

Both have a fixed lot of requests, and so many of them under way at once. What each was served (its prompts at their
first tokens, and new tokens) is compared over the time in which both have requests waiting; throughput is the whole
lot over the time it took, so that the mix of work is the same with fairness and without.
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

from text_generation_bench.scheduling.client import client, complete, quantile, verdict
from text_generation_bench.scheduling.server import Busy, serving

JAIN_BAR = 0.95
COST_BAR = 0.03
RAMP_S = 1.0
RETRY_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=200, help="of the modest tenant; the other has ten times more")
    parser.add_argument("--at-once", type=int, default=24, help="of the modest tenant; the other has ten times more")
    parser.add_argument("--prompt-tokens", type=int, default=100, help="of the modest tenant; the other's are 8 times")
    parser.add_argument("--new-tokens", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--step-ms", type=float, default=10)
    parser.add_argument("--prefill-us", type=float, default=20)
    parser.add_argument("--decode-us", type=float, default=100)
    parser.add_argument("--flag", action="append", default=[], help="a further flag for the launcher")


@dataclass
class Tenant:
    """One tenant's lot."""

    name: str
    requests: int
    at_once: int
    prompt_tokens: int
    served: list[tuple[float, int]] = field(default_factory=list)
    refused: int = 0
    first: list[float] = field(default_factory=list)
    last_first: float = 0.0
    """When the last of its requests was begun with: until then it had something waiting."""

    def tokens(self, start: float, end: float) -> int:
        """Served between two moments."""
        return sum(tokens for at, tokens in self.served if start < at <= end)


async def tenants(arguments: argparse.Namespace) -> None:
    """Fair against first come, first served; with room for all, and with the places there are by default."""
    print(
        f"{'':<28}{'small tok/s':>12}{'flood tok/s':>12}{'Jain':>8}{'tok/s':>9}{'s':>7}{'429s':>7}   TTFT p50 small, flood s"
    )
    roomy = arguments.at_once * 11 + 64
    fair = await play(arguments, "two tenants", roomy, fair=True)
    plain = await play(arguments, "one name for both", roomy, fair=False)
    few = await play(arguments, "two tenants, 128 places", 128, fair=True)
    few_plain = await play(arguments, "one name, 128 places", 128, fair=False)
    for name, (jain, rate), (_, plain_rate) in (("roomy", fair, plain), ("128 places", few, few_plain)):
        cost = 1 - rate / plain_rate
        print(f"{name}: Jain {jain:.4f} (bar {JAIN_BAR:g}): {verdict(holds=jain >= JAIN_BAR)}")
        print(f"{name}: costs {cost:.2%} of throughput (bar {COST_BAR:.0%}): {verdict(holds=cost <= COST_BAR)}")


async def play(arguments: argparse.Namespace, name: str, places: int, *, fair: bool) -> tuple[float, float]:
    """Jain's index, and tokens a second of the whole."""
    small = Tenant("small", arguments.requests, arguments.at_once, arguments.prompt_tokens)
    flood = Tenant("flood", arguments.requests * 10, arguments.at_once * 10, arguments.prompt_tokens * 8)
    flags = (
        "--engine=echo",
        f"--echo-step-ms={arguments.step_ms}",
        f"--echo-prefill-us={arguments.prefill_us}",
        f"--echo-decode-us={arguments.decode_us}",
        f"--max-batch-size={arguments.batch}",
        f"--max-concurrent-requests={places}",
        "--max-queued-tokens=100000000",
        *arguments.flag,
    )
    async with serving(arguments.model, *flags) as server, client() as session:
        await complete(session, server.url, range(100, 150), 4)
        busy, started = Busy(server), time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for tenant in (flood, small):
                lot = iter(range(tenant.requests))
                for number in range(tenant.at_once):
                    draw = random.Random(f"{tenant.name} {number}")
                    header = tenant.name if fair else "everybody"
                    tasks.create_task(
                        _work_off(session, server.url, Work(tenant, header, arguments.new_tokens), lot, draw)
                    )
        ended, others = time.monotonic(), busy.line()
    until = min(small.last_first, flood.last_first)
    start = started + RAMP_S
    tokens = Counter({tenant.name: tenant.tokens(start, until) for tenant in (small, flood)})
    seconds = max(until - start, 1e-9)
    shares = list(tokens.values())
    jain = sum(shares) ** 2 / (2 * sum(share * share for share in shares)) if any(shares) else 0.0
    rate = sum(tenant.tokens(0, ended) for tenant in (small, flood)) / (ended - started)
    print(
        f"{name:<28}{tokens['small'] / seconds:12.0f}{tokens['flood'] / seconds:12.0f}{jain:8.4f}{rate:9.0f}"
        f"{ended - started:7.1f}{small.refused + flood.refused:7}   "
        f"{quantile(small.first, 0.5):.2f}, {quantile(flood.first, 0.5):.2f}; {others}",
        flush=True,
    )
    return jain, rate


@dataclass(frozen=True)
class Work:
    """What one of a tenant's workers is to send."""

    tenant: Tenant
    header: str
    new_tokens: int


async def _work_off(
    session: aiohttp.ClientSession, url: str, work: Work, lot: Iterator[int], draw: random.Random
) -> None:
    tenant = work.tenant

    def served(tokens: int) -> None:
        tenant.served.append((time.monotonic(), tokens))

    for _ in lot:
        prompt = [draw.randrange(1000, 40000) for _ in range(tenant.prompt_tokens)]
        while True:
            answer = await complete(session, url, prompt, work.new_tokens, tenant=work.header, served=served)
            if answer.status != 429:
                break
            tenant.refused += 1
            await asyncio.sleep(RETRY_S * draw.uniform(0.5, 1.5))
        if answer.error:
            raise RuntimeError(answer.error)
        tenant.first.append(answer.first)
        tenant.last_first = max(tenant.last_first, answer.times[0])
