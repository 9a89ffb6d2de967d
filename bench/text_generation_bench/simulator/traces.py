"""Traces: the requests that clients send, lazily, in order of time, reproducible by seed.

A source draws the same requests under every policy. Only the time of a chat's next turn depends on the policy, because a
client thinks after the answer. Texts are slices of one pool of random token ids, which are cheap to make. A slice may be
drawn twice, so a text that must be unique begins with an id that is used once.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from text_generation_bench.load.agents import NEW_TOKENS, AgentSession, AgentTurn
from text_generation_router.request import Priority, QualityOfService, TenantId

POOL_TOKENS = 1 << 18
LONGEST = 1 << 17
"""Longest slice, in tokens."""
VOCABULARY = 32_000


class TokenPool:
    """Random token ids to take texts from, reproducible by seed."""

    def __init__(self, seed: int) -> None:
        ids = Random(seed).choices(range(VOCABULARY), k=POOL_TOKENS)
        self.ids: tuple[int, ...] = (*ids, *ids[:LONGEST])
        """`ids[at : at + length]` is a text for every `at` below POOL_TOKENS."""
        self._unique = VOCABULARY

    def text(self, random: Random, length: int) -> tuple[int, ...]:
        """Return `length` tokens, from 1 to LONGEST, whose first token is unique."""
        self._unique += 1
        at = int(random.random() * POOL_TOKENS)
        return (self._unique, *self.ids[at + 1 : at + length])

    def answer_at(self, random: Random) -> int:
        """Return the index in `ids` at which an answer begins."""
        return int(random.random() * POOL_TOKENS)


NO_TENANT = TenantId("")
TARGET_S = 30.0
"""The target for the first token of the requests that have one."""


@dataclass(slots=True)
class Arrival:
    """A request that a client sends, and the behaviour of the client after it."""

    at: float
    """Time of sending, in seconds since the start."""
    prompt: tuple[int, ...]
    new_tokens: int
    """True length of the answer, which the scheduler does not know."""
    max_new_tokens: int
    answer_at: int
    """Index of the answer in the pool."""
    tenant: TenantId = NO_TENANT
    priority: Priority = Priority.DEFAULT
    queue_s: float | None = None
    """Longest time in the queue, in seconds."""
    total_s: float | None = None
    """Deadline for the whole answer, in seconds."""
    leaves_after_s: float | None = None
    """Time after which the client leaves, in seconds."""
    kind: str = ""
    """Label for separate statistics, such as long prompts among short ones."""
    job: str = ""
    """The name of the session and its sub-agents, or of the user, to which it belongs."""
    first_token_s: float | None = None
    """Target for the first token, in seconds."""
    follow_up: Callable[[float], Arrival | None] | None = None
    """Returns the next request of the client, given the time at which this one finished; None: no further one."""
    siblings: Sequence[Arrival] = ()
    """Requests that the client sends beside it."""

    @property
    def qos(self) -> QualityOfService:
        limits = self.first_token_s, self.queue_s, self.total_s
        first_by, queue_by, end_by = (None if limit is None else self.at + limit for limit in limits)
        return QualityOfService(
            self.tenant, self.priority, first_token_by=first_by, queue_by=queue_by, end_by=end_by, job=self.job
        )


Trace = Iterator[Arrival]


@dataclass(frozen=True, slots=True)
class RequestSizes:
    """Distribution of request sizes, in tokens."""

    prompt: tuple[int, int]
    """Shortest and longest prompt; uniformly distributed."""
    new_mean: int
    """Mean length of answers; exponentially distributed."""
    max_new_tokens: int
    """The clients' max_new_tokens."""

    def prompt_tokens(self, random: Random) -> int:
        """Draw the length of a prompt."""
        low, high = self.prompt
        return low + int(random.random() * (high - low + 1))

    def new_tokens(self, random: Random) -> int:
        """Draw the length of an answer."""
        return max(1, min(self.max_new_tokens, int(-math.log(1.0 - random.random()) * self.new_mean) + 1))

    @property
    def prompt_mean(self) -> float:
        """Mean length of a prompt."""
        return sum(self.prompt) / 2


@dataclass(frozen=True, slots=True)
class ClientProfile:
    """Tenant, priority, deadlines and patience of clients."""

    tenant: TenantId = NO_TENANT
    priority: Priority = Priority.DEFAULT
    queue_s: float | None = None
    total_s: float | None = None
    patience_s: float | None = None
    """Mean time after which impatient clients leave."""
    leaving: float = 0.0
    """Fraction of impatient clients."""
    kind: str = ""
    job: str = ""

    def arrival(self, random: Random, at: float, prompt: tuple[int, ...], new: int, most: int, answer: int) -> Arrival:
        """Return a request of such a client."""
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
            self.job,
        )


DEFAULT_CLIENT = ClientProfile()


def poisson_times(random: Random, rate: float, start: float, end: float) -> Iterator[float]:
    """Yield the times in [start, end) of a Poisson process with `rate` events per second."""
    at = start
    while rate > 0 and (at := at + random.expovariate(rate)) < end:
        yield at


def phased_times(random: Random, phases: Sequence[tuple[float, float]]) -> Iterator[float]:
    """Yield the times of a Poisson process with a varying rate; `phases` are (seconds, rate)."""
    start = 0.0
    for seconds, rate in phases:
        yield from poisson_times(random, rate, start, start + seconds)
        start += seconds


def unrelated_requests(
    pool: TokenPool, random: Random, times: Iterator[float], sizes: RequestSizes, client: ClientProfile = DEFAULT_CLIENT
) -> Trace:
    """Yield unrelated requests."""
    for at in times:
        prompt = pool.text(random, sizes.prompt_tokens(random))
        yield client.arrival(random, at, prompt, sizes.new_tokens(random), sizes.max_new_tokens, pool.answer_at(random))


class ZipfDistribution:
    """Distribution of ranks 0, 1, 2 …: the probability of rank r is proportional to 1 / (r + 1)."""

    def __init__(self, count: int) -> None:
        self._sums = list(accumulate(1 / (rank + 1) for rank in range(count)))

    def draw(self, random: Random) -> int:
        """Draw a rank."""
        return bisect(self._sums, random.random() * self._sums[-1])


def shared_prefixes(
    pool: TokenPool,
    random: Random,
    times: Iterator[float],
    sizes: RequestSizes,
    systems: Sequence[tuple[int, ...]],
    client: ClientProfile = DEFAULT_CLIENT,
) -> Trace:
    """Yield requests that begin with one of a few system prompts; `sizes.prompt` is the length of the rest."""
    zipf = ZipfDistribution(len(systems))
    for at in times:
        prompt = systems[zipf.draw(random)] + pool.text(random, sizes.prompt_tokens(random))
        yield client.arrival(random, at, prompt, sizes.new_tokens(random), sizes.max_new_tokens, pool.answer_at(random))


def system_prompts(pool: TokenPool, random: Random, count: int, length: int) -> list[tuple[int, ...]]:
    """Return `count` system prompts of `length` tokens."""
    return [pool.text(random, length) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class ChatProfile:
    """Distribution of chats."""

    sizes: RequestSizes
    """Sizes of a turn."""
    turns_mean: float
    think_mean_s: float
    """Mean time from the end of an answer to the next turn."""
    longest: int
    """Longest prompt, in tokens; a chat ends before a longer one."""


@dataclass(slots=True)
class _Turn:
    text: tuple[int, ...]
    think_s: float
    request: Arrival
    """The request without its time and prompt."""


class _Chat:
    """One chat, with all turns drawn in advance. A prompt is the whole chat so far plus a new text."""

    __slots__ = ("_at", "_ids", "_profile", "_text", "_turns")

    def __init__(self, ids: tuple[int, ...], profile: ChatProfile, system: tuple[int, ...], turns: list[_Turn]) -> None:
        self._ids = ids
        self._profile = profile
        self._text = system
        self._turns = turns
        self._at = 0

    def next_turn(self, now: float) -> Arrival | None:
        """Return the next request, after the last answer has finished; None at the end of the chat."""
        if self._at > 0:
            last = self._turns[self._at - 1].request
            self._text += self._ids[last.answer_at : last.answer_at + last.new_tokens]
            last.follow_up = None  # breaks a reference cycle
        if self._at == len(self._turns):
            return None
        turn = self._turns[self._at]
        if len(self._text) + len(turn.text) > self._profile.longest:
            return None
        self._at += 1
        self._text += turn.text
        request = turn.request
        request.at, request.prompt, request.follow_up = now + turn.think_s, self._text, self.next_turn
        return request


def chats(
    pool: TokenPool,
    random: Random,
    times: Iterator[float],
    profile: ChatProfile,
    systems: Sequence[tuple[int, ...]] = ((),),
    client: ClientProfile = DEFAULT_CLIENT,
) -> Trace:
    """Yield the first requests of chats that begin at `times`; later turns follow through `follow_up`."""
    zipf = ZipfDistribution(len(systems))
    sizes = profile.sizes
    for at in times:
        turns = []
        for number in range(1 + int(random.expovariate(1 / max(profile.turns_mean - 0.5, 0.1)))):
            length = sizes.prompt_tokens(random)
            text = pool.text(random, length)
            new, answer = sizes.new_tokens(random), pool.answer_at(random)
            think = random.expovariate(1 / profile.think_mean_s) if number else 0.0
            turns.append(_Turn(text, think, client.arrival(random, 0.0, (), new, sizes.max_new_tokens, answer)))
        first = _Chat(pool.ids, profile, systems[zipf.draw(random)], turns).next_turn(at)
        if first is not None:
            yield first


class _Agent:
    """Plays a session of an agent; the prompt of a turn is the context so far."""

    def __init__(
        self,
        source: AgentSource,
        session: AgentSession,
        job: str,
        target_s: float | None,
        end: Callable[[float], Arrival | None] = lambda now: None,
    ) -> None:
        self._source, self._turns, self._job, self._end = source, iter(session.turns), job, end
        self._target_s = target_s
        self._text = source.system()[: session.system_tokens]
        self._turn: AgentTurn | None = None
        self._subagents = 0

    def next_turn(self, now: float) -> Arrival | None:
        """Return the requests that follow once the last answer has finished."""
        self._turn = next(self._turns, None)
        if self._turn is None:
            return self._end(now)
        if not self._turn.subagents:
            return self._send(now)
        self._subagents = len(self._turn.subagents)
        agents = [
            _Agent(self._source, each, self._job, self._target_s, self._subagent_ended) for each in self._turn.subagents
        ]
        first, *others = [each for agent in agents if (each := agent.next_turn(now)) is not None]
        first.siblings = others
        return first

    def _subagent_ended(self, now: float) -> Arrival | None:
        self._subagents -= 1
        return None if self._subagents else self._send(now)

    def _send(self, now: float) -> Arrival:
        turn, pool, random = self._turn, self._source.pool, self._source.random
        assert turn is not None, "a turn is sent once"
        self._text = self._text[: turn.kept] + pool.text(random, turn.added)
        answer = pool.answer_at(random)

        def answered(finished: float) -> Arrival | None:
            self._text += pool.ids[answer : answer + turn.new_tokens]
            return self.next_turn(finished)

        most = max(turn.new_tokens, 4 * NEW_TOKENS)
        arrival = DEFAULT_CLIENT.arrival(random, now + turn.pause_s, self._text, turn.new_tokens, most, answer)
        arrival.job, arrival.follow_up = self._job, answered
        if self._target_s is not None:
            arrival.first_token_s, arrival.kind = self._target_s, "with a target"
        return arrival


@dataclass(frozen=True, slots=True)
class AgentSource:
    """Draws the texts of agents."""

    pool: TokenPool
    random: Random
    systems: Sequence[tuple[int, ...]]
    target_every: int = 0
    """Each session of so many has a target for its first tokens; 0: none."""

    def system(self) -> tuple[int, ...]:
        """Return instructions and tools, which many sessions share."""
        return self.random.choice(self.systems) if self.systems else ()

    def sessions(self, times: Iterator[float], sessions: Iterator[AgentSession]) -> Trace:
        """Yield the first requests of sessions that begin at `times`."""
        for number, (at, session) in enumerate(zip(times, sessions, strict=False)):
            target_s = TARGET_S if self.target_every and number % self.target_every == 0 else None
            if (first := _Agent(self, session, f"session {number}", target_s).next_turn(at)) is not None:
                yield first


def busy_clients(
    pool: TokenPool,
    random: Random,
    count: int,
    sizes: RequestSizes,
    until: float,
    client: ClientProfile = DEFAULT_CLIENT,
) -> Trace:
    """Yield the first requests of `count` clients that send again as soon as they have an answer, until `until`."""
    for number in range(count):
        own = Random(random.random())

        def ask(now: float, own: Random = own) -> Arrival | None:
            if now >= until:
                return None
            prompt = pool.text(own, sizes.prompt_tokens(own))
            new, answer = sizes.new_tokens(own), pool.answer_at(own)
            arrival = client.arrival(own, now, prompt, new, sizes.max_new_tokens, answer)
            arrival.follow_up = ask
            return arrival

        if arrival := ask(number / count):
            yield arrival
