"""The load of one level: the chats to play, with the time at which each begins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from random import Random
from typing import NamedTuple

import numpy as np

from text_generation_bench.load.agents import LONGEST_CONTEXT, AgentSession, draw_session, read_weka
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
    pauses: Sequence[float] = ()
    """Seconds before each turn; those of the settings if there are none."""
    resets: frozenset[int] = frozenset()
    """Turns before which the chat so far is dropped."""
    subagents: Mapping[int, Sequence[PlannedChat]] = field(default_factory=dict)
    """Chats that are played before a turn, at once."""
    session: str = ""
    """The name of the session of an agent and its sub-agents."""


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
    if settings.trace is not None and settings.scenario is None:
        arrivals = read_trace(settings)
        seconds = max(arrivals[-1].at, 1e-9)
        return [Level(0, "trace", len(arrivals) / seconds, is_open_loop=True)]
    if settings.rate:
        return [Level(at, f"{rate:g}/s", rate, is_open_loop=True) for at, rate in enumerate(settings.rate)]
    return [Level(at, f"{open_}", open_, is_open_loop=False) for at, open_ in enumerate(settings.batch_size)]


class DueRequest(NamedTuple):
    """A request of an open loop; None: the lengths of the settings."""

    at: float
    """Seconds since the first."""
    prompt: int | None = None
    new: int | None = None
    blocks: Sequence[int] = ()
    """The numbers of the blocks of its prompt; equal ones have the same text."""


def read_trace(settings: LoadSettings) -> list[DueRequest]:
    """Return the records of --trace in order of time."""
    assert settings.trace is not None
    arrivals = []
    for record in read_records(settings.trace, "--trace"):
        at = record.get("timestamp")
        if not isinstance(at, int | float) or isinstance(at, bool) or not abs(at) < 1e15:
            fail(f"--trace: {settings.trace}: a record has no number as timestamp")
        prompt = number_of(record, ("input_length", "input_tokens", "prompt_tokens"))
        new = number_of(record, ("output_length", "output_tokens", "new_tokens"))
        blocks = record.get("hash_ids") or ()
        if not isinstance(blocks, list | tuple) or not all(isinstance(each, int) and each >= 0 for each in blocks):
            fail(f"--trace: {settings.trace}: hash_ids must be a list of numbers")
        arrivals.append(DueRequest(at * settings.time_scale, prompt, new, blocks if prompt else ()))
    arrivals.sort(key=lambda arrival: arrival.at)
    return [arrival._replace(at=arrival.at - arrivals[0].at) for arrival in arrivals]


def block_size(arrivals: Sequence[DueRequest]) -> int:
    """Return the tokens of a block of a trace: 512 in Mooncake's. The last block of a prompt may be shorter."""
    return max((-(-(each.prompt or 0) // len(each.blocks)) for each in arrivals if each.blocks), default=1)


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
        self._agents = _read_agents(settings)

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
        has_trace = self._settings.trace is not None and self._settings.scenario is None
        size = block_size(read_trace(self._settings)) if has_trace else 1
        for at, prompt, new, blocks in islice(arrivals, self._share.index, None, self._share.processes):
            chat = next(chats)
            turns = [(text, new or own) for text, own in chat.turns]
            if prompt and blocks and not self._records:
                first = self._source.blocks(self._settings.seed, blocks, size, prompt)
                turns[0] = first, turns[0][1]
            elif prompt and not self._records:
                turns = [(self._source.draw(random, prompt), length) for _, length in turns]
            yield PlannedChat(at, chat.system, turns)

    def _random(self, level: Level) -> np.random.Generator:
        """Return a generator that no other level and process has; warm-ups have one number more."""
        return np.random.default_rng((self._settings.seed, level.number, self._share.index, 0))

    def _arrivals(self, level: Level, random: np.random.Generator) -> Iterator[DueRequest]:
        settings = self._settings
        if settings.trace is not None and settings.scenario is None:
            times = iter(read_trace(settings))
        else:
            times = (DueRequest(at) for at in arrival_times(settings, level.value, random))
        until = settings.duration
        if until is None and settings.requests is None and settings.trace is None:
            until = OPEN_LOOP_SECONDS
        for arrival in islice(times, settings.requests):
            if until is not None and arrival.at >= until:
                return
            yield arrival

    def _chats(self, random: np.random.Generator) -> Iterator[PlannedChat]:
        settings, order = self._settings, np.arange(len(self._records))
        if settings.scenario:
            yield from self._sessions(random)
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

    def _sessions(self, random: np.random.Generator) -> Iterator[PlannedChat]:
        """Yield sessions of agents, without end; those of a trace in turn."""
        scale = (self._settings.sequence_length or LONGEST_CONTEXT) / LONGEST_CONTEXT
        for number in count():
            own = Random(int(random.integers(2**62)))
            session = self._agents[number % len(self._agents)] if self._agents else draw_session(own, scale)
            yield self._agent(session, random, f"{own.getrandbits(64):016x}")

    def _agent(self, session: AgentSession, random: np.random.Generator, name: str) -> PlannedChat:
        # All agents of a kind have the same instructions: they follow from the seed and the length.
        kind = np.random.default_rng((self._settings.seed, 3, session.system_tokens))
        system = self._source.draw(kind, session.system_tokens) if session.system_tokens else ""
        context, resets = 0, set[int]()
        for number, turn in enumerate(session.turns):
            if turn.kept is not None and 2 * turn.kept < context:
                resets.add(number)
            context = (context if turn.kept is None else turn.kept) + turn.added + turn.new_tokens
        return PlannedChat(
            0.0,
            system,
            [(self._source.draw(random, turn.added), turn.new_tokens) for turn in session.turns],
            [turn.pause_s for turn in session.turns],
            frozenset(resets),
            {
                number: [self._agent(each, random, name) for each in turn.subagents]
                for number, turn in enumerate(session.turns)
                if turn.subagents
            },
            name,
        )


def _read_agents(settings: LoadSettings) -> list[AgentSession]:
    if not settings.scenario or settings.trace is None:
        return []
    try:
        sessions = [each for each in read_weka(settings.trace) if each.turns]
    except (OSError, ValueError) as error:
        fail(f"--trace: {error}")
    return sessions or fail(f"--trace: {settings.trace}: no session")


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
