"""The load of one level: the chats to play, with the time at which each begins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

import numpy as np

from text_generation_bench.load.dialects import Prompt
from text_generation_bench.load.prompts import TextSource, draw_lengths, number_of, read_dataset, read_records
from text_generation_bench.load.settings import OPEN_LOOP_SECONDS, LoadSettings, fail


@dataclass(frozen=True)
class Level:
    """One level of a sweep: a number of requests kept open, or a rate at which they are sent, or a trace."""

    number: int
    name: str
    value: float
    """Open requests, or requests a second."""
    is_open_loop: bool


@dataclass(frozen=True)
class PlannedChat:
    """Turns to play one after the other. A single request is a chat of one turn."""

    at: float
    """Start, in seconds since that of the level; 0 in a closed loop."""
    system: Prompt
    turns: list[tuple[Prompt, int]]
    """The prompt of each turn, and its new tokens."""


@dataclass(frozen=True)
class Share:
    """The part of a level that one client process plays."""

    index: int
    processes: int

    def of(self, total: int) -> int:
        """Return this process's part of a number."""
        return total // self.processes + (self.index < total % self.processes)


def levels(settings: LoadSettings) -> list[Level]:
    """Return the levels of the sweep."""
    if settings.trace is not None:
        arrivals = read_trace(settings)
        seconds = max(arrivals[-1][0], 1e-9)
        return [Level(0, "trace", len(arrivals) / seconds, is_open_loop=True)]
    if settings.rate:
        return [Level(at, f"{rate:g}/s", rate, is_open_loop=True) for at, rate in enumerate(settings.rate)]
    return [Level(at, f"{open_}", open_, is_open_loop=False) for at, open_ in enumerate(settings.batch_size)]


def read_trace(settings: LoadSettings) -> list[tuple[float, int | None, int | None]]:
    """Return time since the first, prompt tokens and new tokens of each record of --trace, in order of time."""
    assert settings.trace is not None
    arrivals = []
    for record in read_records(settings.trace, "--trace"):
        at = record.get("timestamp")
        if not isinstance(at, int | float) or isinstance(at, bool) or not abs(at) < 1e15:
            fail(f"--trace: {settings.trace}: a record has no number as timestamp")
        prompt = number_of(record, ("input_length", "input_tokens", "prompt_tokens"))
        new = number_of(record, ("output_length", "output_tokens", "new_tokens"))
        arrivals.append((at * settings.time_scale, prompt, new))
    arrivals.sort(key=lambda arrival: arrival[0])
    return [(at - arrivals[0][0], prompt, new) for at, prompt, new in arrivals]


class Workload:
    """Draws the chats of a process; the same seed gives the same ones."""

    def __init__(self, settings: LoadSettings, share: Share) -> None:
        self._settings = settings
        self._share = share
        self._source = TextSource(settings)
        self._records = read_dataset(settings, self._source)
        random = np.random.default_rng(settings.seed)
        self._systems: list[Prompt] = [""]
        if settings.system_length:
            self._systems = [self._source.draw(random, settings.system_length) for _ in range(settings.system_prompts)]

    def warm_up(self, level: Level) -> Iterator[PlannedChat]:
        """Yield chats that no level has, without end."""
        return self._chats(np.random.default_rng((self._settings.seed, level.number, self._share.index, 1)))

    def closed(self, level: Level) -> Iterator[PlannedChat]:
        """Yield the chats of a closed loop."""
        settings = self._settings
        total = None if settings.duration else settings.runs * int(level.value)
        total = settings.requests or total
        return islice(self._chats(self._random(level)), None if total is None else self._share.of(total))

    def open(self, level: Level) -> Iterator[PlannedChat]:
        """Yield the chats of an open loop in order of time: this process's part of those of the whole level."""
        arrivals = self._arrivals(level, np.random.default_rng((self._settings.seed, level.number)))
        random = self._random(level)
        chats = self._chats(random)
        for at, prompt, new in islice(arrivals, self._share.index, None, self._share.processes):
            chat = next(chats)
            turns = [
                (self._source.draw(random, prompt) if prompt and not self._records else text, new or own)
                for text, own in chat.turns
            ]
            yield PlannedChat(at, chat.system, turns)

    def _random(self, level: Level) -> np.random.Generator:
        """Return a generator that no other level and process has; warm-ups have one number more."""
        return np.random.default_rng((self._settings.seed, level.number, self._share.index, 0))

    def _arrivals(self, level: Level, random: np.random.Generator) -> Iterator[tuple[float, int | None, int | None]]:
        settings = self._settings
        if settings.trace is not None:
            times = iter(read_trace(settings))
        else:
            times = ((at, None, None) for at in arrival_times(settings, level.value, random))
        until = settings.duration
        if until is None and settings.requests is None and settings.trace is None:
            until = OPEN_LOOP_SECONDS
        for arrival in islice(times, settings.requests):
            if until is not None and arrival[0] >= until:
                return
            yield arrival

    def _chats(self, random: np.random.Generator) -> Iterator[PlannedChat]:
        settings, order = self._settings, np.arange(len(self._records))
        for number in count():
            system = self._systems[int(random.integers(len(self._systems)))]
            if self._records:
                if number % len(order) == 0:
                    random.shuffle(order)
                record = self._records[order[number % len(order)]]
                lengths = [new or settings.new_tokens for new in record.new_tokens]
                yield PlannedChat(0.0, record.system or system, list(zip(record.prompts, lengths, strict=True)))
                continue
            turns = []
            for _ in range(settings.turns):
                prompt, new = draw_lengths(settings, random)
                turns.append((self._source.draw(random, prompt), new))
            yield PlannedChat(0.0, system, turns)


def arrival_times(settings: LoadSettings, rate: float, random: np.random.Generator) -> Iterator[float]:
    """Yield the times of requests that come at `rate` a second on average."""
    if settings.arrival == "constant":
        yield from (number / rate for number in count())
    elif settings.arrival == "burst":
        size = settings.burst_size
        yield from (number // size * size / rate for number in count())
    else:
        at = 0.0
        while True:
            at += float(random.exponential(1 / rate))
            yield at
