"""Traces: what clients send, and when. Each is lazy, in order of time, and the same for the same seed.

What a source draws does not depend on when its requests are answered, so every policy meets the same clients. Only the
time of a chat's next turn does: a client thinks after the answer, not before.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from text_generation_bench.simulator.arrivals import NOBODY, Arrival, Trace
from text_generation_bench.simulator.tokens import TokenPool
from text_generation_router.request import Priority, TenantId


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large requests are, in tokens."""

    prompt: tuple[int, int]
    """Shortest and longest; all lengths between are as likely."""
    new_mean: int
    """Mean length of answers, which fall off exponentially."""
    new_most: int
    """What clients ask for at most; they do not know how long the answer will be."""

    def prompt_tokens(self, random: Random) -> int:
        """A prompt's length."""
        low, high = self.prompt
        return low + int(random.random() * (high - low + 1))

    def new_tokens(self, random: Random) -> int:
        """An answer's length."""
        return max(1, min(self.new_most, int(-math.log(1.0 - random.random()) * self.new_mean) + 1))

    @property
    def prompt_mean(self) -> float:
        """Mean length of prompts."""
        return sum(self.prompt) / 2


@dataclass(frozen=True, slots=True)
class Client:
    """Who sends, and what they are due."""

    tenant: TenantId = NOBODY
    priority: Priority = Priority.DEFAULT
    queue_s: float | None = None
    total_s: float | None = None
    patience_s: float | None = None
    """Mean of the time after which some leave."""
    leaving: float = 0.0
    """Share of them that would leave."""
    kind: str = ""

    def arrival(self, random: Random, at: float, prompt: tuple[int, ...], new: int, most: int, answer: int) -> Arrival:
        """Its request."""
        leaves = self.patience_s is not None and random.random() < self.leaving
        return Arrival(
            at,
            prompt,
            new,
            most,
            answer,
            self.tenant,
            self.priority,
            self.queue_s,
            self.total_s,
            random.expovariate(1 / self.patience_s) if leaves and self.patience_s else None,
            self.kind,
        )


ANYBODY = Client()


def poisson_times(random: Random, rate: float, start: float, end: float) -> Iterator[float]:
    """Times in [start, end) of a Poisson process with `rate` events a second."""
    at = start
    while rate > 0 and (at := at + random.expovariate(rate)) < end:
        yield at


def phased_times(random: Random, phases: Sequence[tuple[float, float]]) -> Iterator[float]:
    """A Poisson process whose rate changes: `phases` are (seconds, rate)."""
    start = 0.0
    for seconds, rate in phases:
        yield from poisson_times(random, rate, start, start + seconds)
        start += seconds


def singles(pool: TokenPool, random: Random, times: Iterator[float], sizes: Sizes, client: Client = ANYBODY) -> Trace:
    """Requests that have nothing in common."""
    for at in times:
        prompt = pool.text(random, sizes.prompt_tokens(random))
        yield client.arrival(random, at, prompt, sizes.new_tokens(random), sizes.new_most, pool.answer_at(random))


class Zipf:
    """Ranks 0, 1, 2 … of which rank r is drawn in proportion to 1 / (r + 1)."""

    def __init__(self, count: int) -> None:
        self._sums = list(accumulate(1 / (rank + 1) for rank in range(count)))

    def draw(self, random: Random) -> int:
        """A rank."""
        return bisect(self._sums, random.random() * self._sums[-1])


def shared_prefixes(
    pool: TokenPool,
    random: Random,
    times: Iterator[float],
    sizes: Sizes,
    systems: Sequence[tuple[int, ...]],
    client: Client = ANYBODY,
) -> Trace:
    """Requests that begin with one of a few system prompts; `sizes.prompt` is what follows it."""
    zipf = Zipf(len(systems))
    for at in times:
        prompt = systems[zipf.draw(random)] + pool.text(random, sizes.prompt_tokens(random))
        yield client.arrival(random, at, prompt, sizes.new_tokens(random), sizes.new_most, pool.answer_at(random))


def system_prompts(pool: TokenPool, random: Random, count: int, length: int) -> list[tuple[int, ...]]:
    """So many system prompts of so many tokens."""
    return [pool.text(random, length) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class ChatHabits:
    """How people chat."""

    sizes: Sizes
    """Of a turn."""
    turns_mean: float
    think_mean_s: float
    """From an answer's end to the next turn."""
    longest: int
    """Tokens of prompt after which a chat is left."""


@dataclass(slots=True)
class _Turn:
    text: tuple[int, ...]
    think_s: float
    request: Arrival
    """What is sent, but for its time and its prompt."""


class _Chat:
    """What one person says, all drawn beforehand; each prompt is all that was said before, and a new text."""

    __slots__ = ("_at", "_habits", "_ids", "_said", "_turns")

    def __init__(self, ids: tuple[int, ...], habits: ChatHabits, system: tuple[int, ...], turns: list[_Turn]) -> None:
        self._ids = ids
        self._habits = habits
        self._said = system
        self._turns = turns
        self._at = 0

    def next_turn(self, now: float) -> Arrival | None:
        """The next request, the answer to the last one being whole."""
        if self._at > 0:
            last = self._turns[self._at - 1].request
            self._said += self._ids[last.answer_at : last.answer_at + last.new_tokens]
            last.follow_up = None  # or the two would keep each other for good
        if self._at == len(self._turns):
            return None
        turn = self._turns[self._at]
        if len(self._said) + len(turn.text) > self._habits.longest:
            return None
        self._at += 1
        self._said += turn.text
        request = turn.request
        request.at, request.prompt, request.follow_up = now + turn.think_s, self._said, self.next_turn
        return request


def chats(
    pool: TokenPool,
    random: Random,
    times: Iterator[float],
    habits: ChatHabits,
    systems: Sequence[tuple[int, ...]] = ((),),
    client: Client = ANYBODY,
) -> Trace:
    """Chats begin at `times`; each turn's prompt holds the turns and answers before it."""
    zipf = Zipf(len(systems))
    sizes = habits.sizes
    for at in times:
        turns = []
        for number in range(1 + int(random.expovariate(1 / max(habits.turns_mean - 0.5, 0.1)))):
            length = sizes.prompt_tokens(random)
            text = pool.text(random, length)
            new, answer = sizes.new_tokens(random), pool.answer_at(random)
            think = random.expovariate(1 / habits.think_mean_s) if number else 0.0
            turns.append(_Turn(text, think, client.arrival(random, 0.0, (), new, sizes.new_most, answer)))
        first = _Chat(pool.ids, habits, systems[zipf.draw(random)], turns).next_turn(at)
        if first is not None:
            yield first


def busy_clients(
    pool: TokenPool, random: Random, count: int, sizes: Sizes, until: float, client: Client = ANYBODY
) -> Trace:
    """`count` clients that always want something: each sends again as soon as it has its answer, until `until`."""
    for number in range(count):
        own = Random(random.random())

        def ask(now: float, own: Random = own) -> Arrival | None:
            if now >= until:
                return None
            prompt = pool.text(own, sizes.prompt_tokens(own))
            new, answer = sizes.new_tokens(own), pool.answer_at(own)
            arrival = client.arrival(own, now, prompt, new, sizes.new_most, answer)
            arrival.follow_up = ask
            return arrival

        if arrival := ask(number / count):
            yield arrival
