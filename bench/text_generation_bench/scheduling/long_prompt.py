"""A long prompt beside decoding streams: their inter-token latency and its time to first token."""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from text_generation_bench.load.measures import quantile
from text_generation_bench.scheduling.chats import Vocabulary
from text_generation_bench.scheduling.client import client, complete, verdict
from text_generation_bench.scheduling.server import CpuUsage, serving

ITL_BAR = 3.0
TTFT_BAR = 2.0
QUIET_S = 3.0
"""Seconds of undisturbed decoding before each arrival, for comparison."""
SETTLE_S = 0.5
SHARED_STEP_S = 0.05
"""Time after the prompt's first token in which the streams' tokens belong to the same step."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--targets", help="values of --target-itl-ms, instead of --factors")
    parser.add_argument("--factors", default="2,2.5,3", help="targets as multiples of the undisturbed gap")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--arrivals", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flag", action="append", default=[], help="additional flag for the launcher")


@dataclass
class LongPromptTimes:
    """Times measured with one server: TTFT of the prompt, gaps of the streams."""

    alone: list[float] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)
    quiet: list[float] = field(default_factory=list)
    during: list[float] = field(default_factory=list)


class Streams:
    """Streams that decode all the time, and the gaps between their tokens."""

    def __init__(self, words: Sequence[int]) -> None:
        self._words = words
        self._gaps: list[tuple[float, float]] = []
        self._last: dict[int, float] = {}

    def token(self, stream: int, at: float, tokens: int) -> None:
        """Record a token of a stream; a number other than 1 counts prompt tokens."""
        if tokens != 1:
            return
        if stream in self._last:
            self._gaps.append((at, at - self._last[stream]))
        self._last[stream] = at

    def between(self, start: float, end: float) -> list[float]:
        """Return the gaps that ended between two times."""
        return [gap for at, gap in self._gaps if start < at <= end]

    async def keep(self, session: aiohttp.ClientSession, url: str, stream: int) -> None:
        """Decode until cancelled."""
        while True:
            self._last.pop(stream, None)
            prompt = [self._words[stream]] * 20
            answer = await complete(
                session, url, prompt, 6000, served=lambda tokens: self.token(stream, time.monotonic(), tokens)
            )
            if answer.error:
                raise RuntimeError(answer.error)


async def long_prompt(arguments: argparse.Namespace) -> None:
    """Measure without a target, then with targets that are multiples of the median gap."""
    print(
        f"{'target':>7} |{'quiet p50':>10}{'p99':>7}{'max':>7} |{'during p50':>11}{'p99':>7}{'max':>7}{'p99 ratio':>10} |"
        f"{'TTFT alone':>11}{'beside':>8}{'ratio':>7}   (ms)"
    )
    quiet = await measure(arguments, 0.0)
    if arguments.targets:
        targets = [float(target) for target in arguments.targets.split(",")]
    else:
        targets = [round(float(factor) * quiet) for factor in arguments.factors.split(",")]
    for target in targets:
        await measure(arguments, target)


async def measure(arguments: argparse.Namespace, target: float) -> float:
    """Measure with one target and print a line; return the median undisturbed gap in milliseconds."""
    words = Vocabulary(arguments.model).words
    draw = random.Random(arguments.seed)
    times = LongPromptTimes()
    flags = (f"--engine={arguments.engine}", "--dtype=float32", f"--target-itl-ms={target}", *arguments.flag)
    async with serving(arguments.model, *flags) as server, client() as session:

        async def arrive() -> tuple[float, float, float]:
            prompt = draw.choices(words, k=arguments.prompt_tokens)
            answer = await complete(session, server.url, prompt, 2)
            if answer.error:
                raise RuntimeError(answer.error)
            return answer.first, answer.sent, answer.times[0]

        usage = CpuUsage(server)
        # The first round does not count: memory is touched for the first time, step costs are unknown.
        for number in range(arguments.arrivals + 1):
            if number == 1:
                times = LongPromptTimes()
            times.alone.append((await arrive())[0])
            streams = Streams(words)
            async with asyncio.TaskGroup() as tasks:
                tasks_of_streams = [
                    tasks.create_task(streams.keep(session, server.url, place)) for place in range(arguments.streams)
                ]
                await asyncio.sleep(SETTLE_S)
                start = time.monotonic()
                await asyncio.sleep(QUIET_S)
                times.quiet += streams.between(start, time.monotonic())
                first, sent, came = await arrive()
                times.loaded.append(first)
                await asyncio.sleep(SETTLE_S)
                times.during += streams.between(sent, came + SHARED_STEP_S)
                for task in tasks_of_streams:
                    task.cancel()
            await asyncio.sleep(SETTLE_S)  # until the server has noticed
        report(target, times, usage.line())
    return quantile(times.quiet, 0.5) * 1e3


def report(target: float, times: LongPromptTimes, usage: str) -> None:
    """Print one line."""
    quiet, during = ([gap * 1e3 for gap in gaps] for gaps in (times.quiet, times.during))
    itl = quantile(during, 0.99) / quantile(quiet, 0.99)
    alone, loaded = statistics.median(times.alone) * 1e3, statistics.median(times.loaded) * 1e3
    holds = itl <= ITL_BAR and loaded / alone <= TTFT_BAR
    print(
        f"{target:7g} |{quantile(quiet, 0.5):10.1f}{quantile(quiet, 0.99):7.1f}{max(quiet):7.1f} |"
        f"{quantile(during, 0.5):11.1f}{quantile(during, 0.99):7.1f}{max(during):7.1f}{itl:10.2f} |"
        f"{alone:11.0f}{loaded:8.0f}{loaded / alone:7.2f}   {verdict(holds=holds):<7} {usage}",
        flush=True,
    )
