"""Three times more than the server can do: what it still gets done, and what it tells those it turns away."""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from bisect import bisect_right
from dataclasses import dataclass, field

import aiohttp

from text_generation_bench.scheduling.client import Answer, client, complete_whole, metrics, quantile, verdict
from text_generation_bench.scheduling.server import Busy, Server, serving

GOODPUT_BAR = 0.95
REFUSAL_BAR_S = 0.01
WAIT_BAR = 0.3
SCRAPE_S = 0.5
FRESH_S = 1.0
"""A refusal this much earlier still says what wait was foreseen."""
RAMP_S = 10.0
"""Of each phase, before what counts: full queues are what is to be measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--peak-seconds", type=float, default=30)
    parser.add_argument("--factor", type=float, default=3.0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=100, help="mean; 20 %% to 180 %% of it")
    parser.add_argument("--step-ms", type=float, default=20)
    parser.add_argument("--prefill-us", type=float, default=50)
    parser.add_argument("--decode-us", type=float, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flag", action="append", default=[], help="a further flag for the launcher")


@dataclass
class Load:
    """Requests of one phase."""

    arguments: argparse.Namespace
    draw: random.Random
    answers: list[Answer] = field(default_factory=list)
    queue_sizes: list[float] = field(default_factory=list)
    queued_tokens: list[float] = field(default_factory=list)

    counted: tuple[float, float] = (0.0, 0.0)
    """The moments between which counts what happens."""

    async def one(self, session: aiohttp.ClientSession, url: str) -> None:
        """Send one request, and keep its answer."""
        mean = self.arguments.new_tokens
        new = max(1, round(mean * self.draw.uniform(0.2, 1.8)))
        prompt = [self.draw.randrange(1000, 40000) for _ in range(self.arguments.prompt_tokens)]
        self.answers.append(await complete_whole(session, url, prompt, new))

    def goodput(self, start: float, end: float) -> float:
        """New tokens a second of answers that were whole between two moments."""
        return sum(one.generated for one in self.answers if start < one.ended <= end) / (end - start)

    async def watch(self, session: aiohttp.ClientSession, url: str) -> None:
        """Look at the queue until cancelled."""
        while True:
            figures = await metrics(session, url)
            self.queue_sizes.append(figures["tgi_queue_size"])
            self.queued_tokens.append(figures["text_generation_queued_tokens"])
            await asyncio.sleep(SCRAPE_S)


async def overload(arguments: argparse.Namespace) -> None:
    """Find the peak, go beyond it."""
    flags = (
        "--engine=echo",
        f"--echo-step-ms={arguments.step_ms}",
        f"--echo-prefill-us={arguments.prefill_us}",
        f"--echo-decode-us={arguments.decode_us}",
        f"--max-batch-size={arguments.batch}",
        *arguments.flag,
    )
    batch = arguments.batch
    async with serving(arguments.model, *flags) as server, client() as session:
        peaks = [await peak(arguments, server, session, at_once) for at_once in (batch, batch * 3 // 2, batch * 3)]
        rate = max(rate for _, rate in peaks)
        load = await flood(arguments, server, session, rate * arguments.factor)
        # Once more: whoever else uses the machine does so in waves.
        after = await peak(arguments, server, session, batch * 3 + 1)
    report(load, max(peaks)[0], after[0])


async def peak(
    arguments: argparse.Namespace, server: Server, session: aiohttp.ClientSession, at_once: int
) -> tuple[float, float]:
    """The goodput of so many clients that wait for their answers, and the requests a second of that."""
    # Other prompts in each phase: they are not to find each other's in the KV cache.
    load = Load(arguments, random.Random(f"{arguments.seed} {at_once}"))
    started = time.monotonic()
    ramp, end = started + RAMP_S, started + RAMP_S + arguments.peak_seconds
    busy = Busy(server)

    async def work() -> None:
        while time.monotonic() < end:
            await load.one(session, server.url)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(work())
    goodput = load.goodput(ramp, end)
    rate = sum(ramp < one.ended <= end for one in load.answers) / (end - ramp)
    print(f"{at_once} at once: {goodput:.0f} tok/s, {rate:.1f} requests/s; {busy.line()}", flush=True)
    return goodput, rate


async def flood(arguments: argparse.Namespace, server: Server, session: aiohttp.ClientSession, rate: float) -> Load:
    """Poisson arrivals at `rate` a second, whatever becomes of them."""
    load = Load(arguments, random.Random(arguments.seed + 1))
    busy, started = Busy(server), time.monotonic()
    end = started + RAMP_S + arguments.seconds
    at = started
    lag = 0.0
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(load.watch(session, server.url))
        async with asyncio.TaskGroup() as requests:
            while at < end:
                at += load.draw.expovariate(rate)
                await asyncio.sleep(max(0.0, at - time.monotonic()))
                lag = max(lag, time.monotonic() - at)
                requests.create_task(load.one(session, server.url))
        watching.cancel()
    print(f"arrivals at {rate:.1f}/s for {arguments.seconds:g} s, at most {lag * 1e3:.0f} ms late; {busy.line()}")
    load.counted = (started + RAMP_S, end)
    return load


def report(load: Load, peak: float, after: float) -> None:
    """The table: against the best of the closed loops before, and the one after."""
    start, end = load.counted
    sent = [one for one in load.answers if start < one.sent <= end]
    done = [one for one in sent if one.status == 200]
    refused = sorted((one for one in load.answers if one.status == 429), key=lambda one: one.ended)
    other = [one for one in sent if one.status not in (200, 429)]
    goodput = load.goodput(start, end)
    holds = goodput >= GOODPUT_BAR * peak
    print(f"goodput {goodput:.0f} tok/s, {goodput / peak:.3f} of the peak {peak:.0f}: {verdict(holds=holds)}")
    print(f"(of {after:.0f} afterwards: {goodput / after:.3f})")
    print(f"{len(done)} answered, {len(refused)} refused, {len(other)} others {[one.error for one in other[:2]]}")
    print(f"queue: at most {max(load.queue_sizes):.0f} requests, {max(load.queued_tokens):.0f} tokens")
    if not refused:
        return
    late = [one.ended - one.sent for one in refused]
    p50, p99 = quantile(late, 0.5) * 1e3, quantile(late, 0.99) * 1e3
    print(
        f"refusals: p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {max(late) * 1e3:.0f}: {verdict(holds=p99 < REFUSAL_BAR_S * 1e3)}"
    )
    told = [float(one.headers.get("retry-after", "nan")) for one in refused]
    print(f"Retry-After: p1 {quantile(told, 0.01):g}, p50 {quantile(told, 0.5):g}, p99 {quantile(told, 0.99):g} s")
    print_waits(done, refused, told)


def print_waits(done: list[Answer], refused: list[Answer], told: list[float]) -> None:
    """What the last refusal before each admission foretold, against what the admitted request waited."""
    moments = [one.ended for one in refused]
    errors, waits = [], []
    for one in done:
        before = bisect_right(moments, one.sent) - 1
        if before >= 0 and one.sent - moments[before] < FRESH_S:
            wait = float(one.headers["x-queue-time"]) / 1e3
            waits.append(wait)
            if wait > 0:
                errors.append(told[before] / wait - 1)
    if not errors:
        return
    typical = statistics.median(map(abs, errors))
    print(f"waits: p1 {quantile(waits, 0.01):.2f}, p50 {quantile(waits, 0.5):.2f}, p99 {quantile(waits, 0.99):.2f} s")
    print(
        f"foretold less waited, of waited, over {len(errors)}: median {statistics.median(errors):+.0%}, median of its size "
        f"{typical:.0%}, {sum(abs(error) <= WAIT_BAR for error in errors) / len(errors):.0%} within 30 %: "
        f"{verdict(holds=typical <= WAIT_BAR)}"
    )
