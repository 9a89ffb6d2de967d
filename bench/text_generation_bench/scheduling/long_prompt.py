"""A long prompt that arrives while streams decode: what it does to them, and how long it takes beside them."""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from text_generation_bench.scheduling.chats import Vocabulary
from text_generation_bench.scheduling.client import client, complete, quantile, verdict
from text_generation_bench.scheduling.server import Busy, serving

ITL_BAR = 3.0
TTFT_BAR = 2.0
QUIET_S = 3.0
"""Undisturbed decoding before each arrival: what gaps are compared with."""
SETTLE_S = 0.5
SHARED_STEP_S = 0.05
"""After the prompt's first token: the streams' tokens of the same step."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--targets", help="values of --target-itl-ms, instead of those that the factors give")
    parser.add_argument("--factors", default="2,2.5,3", help="targets, in multiples of a gap without the prompt")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--arrivals", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flag", action="append", default=[], help="a further flag for the launcher")


@dataclass
class Figures:
    """Of one server."""

    alone: list[float] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)
    quiet: list[float] = field(default_factory=list)
    during: list[float] = field(default_factory=list)


class Streams:
    """Streams that decode all the time; the gaps between their tokens, by the moment they ended."""

    def __init__(self, words: Sequence[int]) -> None:
        self._words = words
        self._gaps: list[tuple[float, float]] = []
        self._last: dict[int, float] = {}

    def token(self, stream: int, at: float, tokens: int) -> None:
        """`stream` got a token; other numbers of `tokens` are its prompt."""
        if tokens != 1:
            return
        if stream in self._last:
            self._gaps.append((at, at - self._last[stream]))
        self._last[stream] = at

    def between(self, start: float, end: float) -> list[float]:
        """Gaps that ended between two moments."""
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
    """One server without a target, then one for each target: so many times the gaps seen without one."""
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
    """Print one line; the median gap in milliseconds while nothing else came."""
    words = Vocabulary(arguments.model).words
    draw = random.Random(arguments.seed)
    figures = Figures()
    flags = (f"--engine={arguments.engine}", "--dtype=float32", f"--target-itl-ms={target}", *arguments.flag)
    async with serving(arguments.model, *flags) as server, client() as session:

        async def arrive() -> tuple[float, float, float]:
            prompt = draw.choices(words, k=arguments.prompt_tokens)
            answer = await complete(session, server.url, prompt, 2)
            if answer.error:
                raise RuntimeError(answer.error)
            return answer.first, answer.sent, answer.times[0]

        busy = Busy(server)
        # The first round does not count: memory is touched for the first time, costs are not known.
        for number in range(arguments.arrivals + 1):
            if number == 1:
                figures = Figures()
            figures.alone.append((await arrive())[0])
            streams = Streams(words)
            async with asyncio.TaskGroup() as tasks:
                kept = [
                    tasks.create_task(streams.keep(session, server.url, place)) for place in range(arguments.streams)
                ]
                await asyncio.sleep(SETTLE_S)
                start = time.monotonic()
                await asyncio.sleep(QUIET_S)
                figures.quiet += streams.between(start, time.monotonic())
                first, sent, came = await arrive()
                figures.loaded.append(first)
                await asyncio.sleep(SETTLE_S)
                figures.during += streams.between(sent, came + SHARED_STEP_S)
                for task in kept:
                    task.cancel()
            await asyncio.sleep(SETTLE_S)  # until the server knows
        report(target, figures, busy.line())
    return quantile(figures.quiet, 0.5) * 1e3


def report(target: float, figures: Figures, busy: str) -> None:
    """One line."""
    quiet, during = ([gap * 1e3 for gap in gaps] for gaps in (figures.quiet, figures.during))
    itl = quantile(during, 0.99) / quantile(quiet, 0.99)
    alone, loaded = statistics.median(figures.alone) * 1e3, statistics.median(figures.loaded) * 1e3
    holds = itl <= ITL_BAR and loaded / alone <= TTFT_BAR
    print(
        f"{target:7g} |{quantile(quiet, 0.5):10.1f}{quantile(quiet, 0.99):7.1f}{max(quiet):7.1f} |"
        f"{quantile(during, 0.5):11.1f}{quantile(during, 0.99):7.1f}{max(during):7.1f}{itl:10.2f} |"
        f"{alone:11.0f}{loaded:8.0f}{loaded / alone:7.2f}   {verdict(holds=holds):<7} {busy}",
        flush=True,
    )
