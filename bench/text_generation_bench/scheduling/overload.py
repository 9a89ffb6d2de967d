"""Load of three times the capacity: goodput, and the rejections."""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from bisect import bisect_right
from dataclasses import dataclass, field

import aiohttp

from text_generation_bench.load.measures import quantile
from text_generation_bench.scheduling.client import Completion, client, complete_whole, metrics, verdict
from text_generation_bench.scheduling.server import BenchServer, CpuUsage, serving

GOODPUT_BAR = 0.95
REFUSAL_BAR_S = 0.01
WAIT_BAR = 0.3
SCRAPE_S = 0.5
MAX_AGE_S = 1.0
"""Longest age of a rejection whose Retry-After is compared with an actual queue time."""
RAMP_S = 10.0
"""Seconds at the start of each phase that are not measured, until the queues are full."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--peak-seconds", type=float, default=30)
    parser.add_argument("--factor", type=float, default=3.0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=100, help="mean; drawn from 20 %% to 180 %% of it")
    parser.add_argument("--step-ms", type=float, default=20)
    parser.add_argument("--prefill-us", type=float, default=50)
    parser.add_argument("--decode-us", type=float, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flag", action="append", default=[], help="additional flag for the launcher")


@dataclass
class LoadPhase:
    """The requests of one phase and samples of the queue."""

    arguments: argparse.Namespace
    draw: random.Random
    answers: list[Completion] = field(default_factory=list)
    queue_sizes: list[float] = field(default_factory=list)
    queued_tokens: list[float] = field(default_factory=list)

    counted: tuple[float, float] = (0.0, 0.0)
    """Start and end of the measured time."""

    async def send(self, session: aiohttp.ClientSession, url: str) -> None:
        """Send one request and record its answer."""
        mean = self.arguments.new_tokens
        new = max(1, round(mean * self.draw.uniform(0.2, 1.8)))
        prompt = [self.draw.randrange(1000, 40000) for _ in range(self.arguments.prompt_tokens)]
        self.answers.append(await complete_whole(session, url, prompt, new))

    def goodput(self, start: float, end: float) -> float:
        """Return the new tokens per second of answers that finished between two times."""
        return sum(answer.generated for answer in self.answers if start < answer.ended <= end) / (end - start)

    async def watch(self, session: aiohttp.ClientSession, url: str) -> None:
        """Sample the queue until cancelled."""
        while True:
            values = await metrics(session, url)
            self.queue_sizes.append(values["tgi_queue_size"])
            self.queued_tokens.append(values["text_generation_queued_tokens"])
            await asyncio.sleep(SCRAPE_S)


async def overload(arguments: argparse.Namespace) -> None:
    """Measure the peak and then the overload."""
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
        # Once more: the use of the machine by other programs varies.
        after = await peak(arguments, server, session, batch * 3 + 1)
    report(load, max(peaks)[0], after[0])


async def peak(
    arguments: argparse.Namespace, server: BenchServer, session: aiohttp.ClientSession, at_once: int
) -> tuple[float, float]:
    """Return goodput and requests per second of `at_once` clients that each wait for their answer."""
    # Different prompts in each phase, so that none is found in the prefix cache.
    load = LoadPhase(arguments, random.Random(f"{arguments.seed} {at_once}"))
    started = time.monotonic()
    ramp, end = started + RAMP_S, started + RAMP_S + arguments.peak_seconds
    usage = CpuUsage(server)

    async def work() -> None:
        while time.monotonic() < end:
            await load.send(session, server.url)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(work())
    goodput = load.goodput(ramp, end)
    rate = sum(ramp < answer.ended <= end for answer in load.answers) / (end - ramp)
    print(f"{at_once} at once: {goodput:.0f} tok/s, {rate:.1f} requests/s; {usage.line()}", flush=True)
    return goodput, rate


async def flood(
    arguments: argparse.Namespace, server: BenchServer, session: aiohttp.ClientSession, rate: float
) -> LoadPhase:
    """Send Poisson arrivals at `rate` per second, independent of answers."""
    load = LoadPhase(arguments, random.Random(arguments.seed + 1))
    usage, started = CpuUsage(server), time.monotonic()
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
                requests.create_task(load.send(session, server.url))
        watching.cancel()
    print(f"arrivals at {rate:.1f}/s for {arguments.seconds:g} s, at most {lag * 1e3:.0f} ms late; {usage.line()}")
    load.counted = (started + RAMP_S, end)
    return load


def report(load: LoadPhase, peak: float, after: float) -> None:
    """Print the results, relative to the best closed loop before and the one after."""
    start, end = load.counted
    sent = [answer for answer in load.answers if start < answer.sent <= end]
    done = [answer for answer in sent if answer.status == 200]
    rejected = sorted((answer for answer in load.answers if answer.status == 429), key=lambda answer: answer.ended)
    other = [answer for answer in sent if answer.status not in (200, 429)]
    goodput = load.goodput(start, end)
    holds = goodput >= GOODPUT_BAR * peak
    print(f"goodput {goodput:.0f} tok/s, {goodput / peak:.3f} of the peak {peak:.0f}: {verdict(holds=holds)}")
    print(f"(of {after:.0f} afterwards: {goodput / after:.3f})")
    print(
        f"{len(done)} answered, {len(rejected)} rejected, {len(other)} others {[answer.error for answer in other[:2]]}"
    )
    print(f"queue: at most {max(load.queue_sizes):.0f} requests, {max(load.queued_tokens):.0f} tokens")
    if not rejected:
        return
    late = [answer.ended - answer.sent for answer in rejected]
    p50, p99 = quantile(late, 0.5) * 1e3, quantile(late, 0.99) * 1e3
    print(
        f"rejections: p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {max(late) * 1e3:.0f}: {verdict(holds=p99 < REFUSAL_BAR_S * 1e3)}"
    )
    retry_after = [float(answer.headers.get("retry-after", "nan")) for answer in rejected]
    print(
        f"Retry-After: p1 {quantile(retry_after, 0.01):g}, p50 {quantile(retry_after, 0.5):g}, p99 {quantile(retry_after, 0.99):g} s"
    )
    print_waits(done, rejected, retry_after)


def print_waits(done: list[Completion], rejected: list[Completion], retry_after: list[float]) -> None:
    """Compare the Retry-After of the last rejection before each admitted request with its queue time."""
    moments = [answer.ended for answer in rejected]
    errors, waits = [], []
    for answer in done:
        before = bisect_right(moments, answer.sent) - 1
        if before >= 0 and answer.sent - moments[before] < MAX_AGE_S:
            wait = float(answer.headers["x-queue-time"]) / 1e3
            waits.append(wait)
            if wait > 0:
                errors.append(retry_after[before] / wait - 1)
    if not errors:
        return
    typical = statistics.median(map(abs, errors))
    print(
        f"queue times: p1 {quantile(waits, 0.01):.2f}, p50 {quantile(waits, 0.5):.2f}, p99 {quantile(waits, 0.99):.2f} s"
    )
    print(
        f"(Retry-After - queue time) / queue time, over {len(errors)}: median {statistics.median(errors):+.0%}, median absolute value "
        f"{typical:.0%}, {sum(abs(error) <= WAIT_BAR for error in errors) / len(errors):.0%} within 30 %: "
        f"{verdict(holds=typical <= WAIT_BAR)}"
    )
