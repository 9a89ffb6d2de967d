"""The scenarios, by name: which clients come, how many, and what is to be seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from operator import attrgetter
from random import Random
from types import MappingProxyType

from text_generation_bench.simulator.arrivals import Trace
from text_generation_bench.simulator.machine import Machine
from text_generation_bench.simulator.setup import Outage
from text_generation_bench.simulator.tokens import TokenPool
from text_generation_bench.simulator.traces import (
    ChatHabits,
    Client,
    Sizes,
    busy_clients,
    chats,
    phased_times,
    poisson_times,
    shared_prefixes,
    singles,
    system_prompts,
)
from text_generation_router.request import Priority, TenantId

LONG = "long"
"""Kind of the long prompts among short ones."""
QUEUE_S = 1.0
"""Seconds of work that may wait where the queue is bounded."""


@dataclass(frozen=True, slots=True)
class Custom:
    """How large things are that a machine of a kind is asked for."""

    question: Sizes
    turn: Sizes
    system_tokens: int
    long_prompt: int
    longest_chat: int


CUSTOMS: Mapping[str, Custom] = MappingProxyType(
    {
        "cpu-135m": Custom(Sizes((20, 160), 48, 160), Sizes((10, 60), 32, 96), 256, 2000, 1500),
        "h200-8b": Custom(Sizes((200, 800), 100, 512), Sizes((50, 300), 100, 512), 2000, 65_536, 8000),
    }
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a scenario is made for."""

    machine: Machine
    custom: Custom
    replicas: int
    seconds: float
    seed: int
    pool: TokenPool

    def random(self, name: str) -> Random:
        """A stream of numbers of its own for each source of requests."""
        return Random(f"{self.seed}/{name}")

    def rate(self, share: float, sizes: Sizes, before: int = 0) -> float:
        """Requests a second that are such a share of what all replicas can serve; `before`: tokens before each prompt."""
        return share * self.replicas * self.machine.capacity(before + sizes.prompt_mean, sizes.new_mean)


@dataclass(frozen=True, slots=True)
class Scene:
    """What a run is played with."""

    trace: Trace
    outages: Sequence[Outage] = ()
    most_queued: int | None = None
    """Tokens of work that may wait."""
    overload: tuple[float, float] | None = None
    """From when to when more is asked for than can be served."""
    with_fairness: bool = False


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario."""

    summary: str
    build: Callable[[Setting], Scene]
    replicas: int = 4
    seconds: float = 60.0
    kv_share: float = 1.0
    """Share of the machine's KV cache that there is."""
    policies: Sequence[str] = ("ours", "no-reuse", "least-loaded", "round-robin", "random", "tgi")


def _poisson(setting: Setting, share: float = 0.7) -> Scene:
    sizes, random = setting.custom.question, setting.random("poisson")
    times = poisson_times(random, setting.rate(share, sizes), 0.0, setting.seconds)
    return Scene(singles(setting.pool, random, times, sizes))


def _tight(setting: Setting) -> Scene:
    return _poisson(setting, share=0.8)


def _bursts(setting: Setting) -> Scene:
    sizes, random = setting.custom.question, setting.random("bursts")
    on, off = setting.rate(2.0, sizes), setting.rate(0.1, sizes)
    phases = [(5.0, on), (15.0, off)] * max(1, round(setting.seconds / 20))
    return Scene(singles(setting.pool, random, phased_times(random, phases), sizes))


def _prefixes(setting: Setting) -> Scene:
    sizes, length, random = setting.custom.turn, setting.custom.system_tokens, setting.random("prefixes")
    # Together they are more than one replica can keep.
    count = max(8, round(1.5 * setting.machine.kv_tokens / length))
    systems = system_prompts(setting.pool, random, count, length)
    times = poisson_times(random, setting.rate(0.9, sizes, length), 0.0, setting.seconds)
    return Scene(shared_prefixes(setting.pool, random, times, sizes, systems))


def _steady(setting: Setting) -> Scene:
    sizes, random = setting.custom.question, setting.random("steady")
    times = poisson_times(random, setting.rate(0.3, sizes), 0.0, setting.seconds)
    return Scene(singles(setting.pool, random, times, sizes))


def _long(setting: Setting) -> Scene:
    custom, random = setting.custom, setting.random("long")
    sizes = Sizes((custom.long_prompt, custom.long_prompt), custom.question.new_mean, custom.question.new_most)
    rate = setting.rate(0.2, sizes)
    times = poisson_times(random, rate, 0.0, setting.seconds)
    books = singles(setting.pool, random, times, sizes, Client(kind=LONG))
    return Scene(_together(_steady(setting).trace, books))


def _chats(setting: Setting, share: float = 0.6) -> Scene:
    custom, random = setting.custom, setting.random("chats")
    habits = ChatHabits(custom.turn, turns_mean=6.0, think_mean_s=8.0, longest=custom.longest_chat)
    systems = system_prompts(setting.pool, random, 8, custom.system_tokens // 4)
    rate = setting.rate(share, custom.turn, custom.system_tokens // 4) / habits.turns_mean
    times = poisson_times(random, rate, 0.0, setting.seconds)
    return Scene(chats(setting.pool, random, times, habits, systems))


def _tenants(setting: Setting) -> Scene:
    sizes = setting.custom.question
    low, high = sizes.prompt[0] // 2, sizes.prompt[1] // 2
    short = Sizes((low, high), sizes.new_mean, sizes.new_most)
    tall = Sizes((8 * low, 8 * high), sizes.new_mean, sizes.new_most)
    clients = 2 * setting.machine.slots * setting.replicas
    light = busy_clients(
        setting.pool, setting.random("light"), clients, short, setting.seconds, Client(TenantId("light"), kind="light")
    )
    heavy = busy_clients(
        setting.pool,
        setting.random("heavy"),
        10 * clients,
        tall,
        setting.seconds,
        Client(TenantId("heavy"), kind="heavy"),
    )
    return Scene(_together(light, heavy), with_fairness=True)


def _overload(setting: Setting) -> Scene:
    sizes, random = setting.custom.question, setting.random("overload")
    before, during = setting.seconds / 4, setting.seconds / 2
    full = setting.rate(1.0, sizes)
    phases = [(before, 0.95 * full), (during, 3.0 * full), (before, 0.5 * full)]
    most = QUEUE_S * full * (sizes.prompt_mean + sizes.new_mean)
    return Scene(
        singles(setting.pool, random, phased_times(random, phases), sizes),
        most_queued=int(most),
        overload=(before, before + during),
    )


def _failures(setting: Setting) -> Scene:
    outages = []
    at, replica = 5.0, 0
    while at < setting.seconds:
        outages.append(Outage(at, replica % setting.replicas, 10.0))
        at, replica = at + 12.5, replica + 1
    return Scene(_chats(setting, share=0.5).trace, outages=outages)


def _mix(setting: Setting) -> Scene:
    custom, pool = setting.custom, setting.pool
    shop = Client(TenantId("shop"), Priority.INTERACTIVE, queue_s=10.0, patience_s=5.0, leaving=0.05, kind="shop")
    batch = Client(TenantId("batch"), Priority.BULK, kind="batch")
    lab = Client(TenantId("lab"), total_s=60.0, kind=LONG)
    long = Sizes((custom.long_prompt // 4, custom.long_prompt), custom.question.new_mean, custom.question.new_most)
    random = setting.random("mix")
    systems = system_prompts(pool, random, 32, custom.system_tokens)
    questions = poisson_times(random, setting.rate(0.25, custom.turn, custom.system_tokens), 0.0, setting.seconds)
    books = setting.random("books")
    bulk = setting.random("bulk")
    on = setting.rate(1.0, custom.question)
    phases = [(10.0, 0.0), (10.0, on)] * max(1, round(setting.seconds / 20))
    return Scene(
        _together(
            _chats(setting, share=0.25).trace,
            shared_prefixes(pool, random, questions, custom.turn, systems, shop),
            singles(pool, books, poisson_times(books, setting.rate(0.05, long), 0.0, setting.seconds), long, lab),
            singles(pool, bulk, phased_times(bulk, phases), custom.question, batch),
        )
    )


def _scale(setting: Setting) -> Scene:
    random, custom = setting.random("scale"), setting.custom
    # 0.4 requests a second and replica; prompts of 200 to 800 tokens for most, longer as a chat goes on.
    habits = ChatHabits(Sizes((50, 200), 100, 512), turns_mean=3.0, think_mean_s=10.0, longest=custom.longest_chat)
    systems = system_prompts(setting.pool, random, 64, 150)
    times = poisson_times(random, 0.4 * setting.replicas / 2.9, 0.0, setting.seconds)
    return Scene(chats(setting.pool, random, times, habits, systems))


def _together(*traces: Trace) -> Trace:
    return iter(merge(*traces, key=attrgetter("at")))


SCENARIOS: Mapping[str, Scenario] = MappingProxyType(
    {
        "poisson": Scenario("unrelated requests at 0.7 of capacity", _poisson),
        "bursts": Scenario("5 s at twice the capacity, then 15 s at a tenth of it", _bursts),
        "tight": Scenario(
            "unrelated requests at 0.8 of capacity, with a fortieth of the KV cache",
            _tight,
            kv_share=1 / 40,
            policies=("ours", "no-reuse", "tgi"),
        ),
        "prefixes": Scenario("system prompts by Zipf, more of them than one replica can keep", _prefixes),
        "chats": Scenario("chats of six turns, each prompt with all turns before it", _chats),
        "steady": Scenario("the short requests of `long`, alone", _steady, policies=("ours", "no-target", "tgi")),
        "long": Scenario(
            "short requests, and now and then a very long prompt", _long, policies=("ours", "no-target", "tgi")
        ),
        "tenants": Scenario(
            "two tenants that always want more: 10 times the clients, 8 times the prompts",
            _tenants,
            replicas=1,
            seconds=60.0,
            policies=("ours", "fcfs", "tgi"),
        ),
        "overload": Scenario(
            "three times the capacity for half of the time", _overload, seconds=240.0, policies=("ours", "tgi")
        ),
        "failures": Scenario(
            "chats, while every 12.5 s a replica is lost for 10 s", _failures, policies=("ours", "round-robin", "tgi")
        ),
        "mix": Scenario("all of these at once: tenants, classes, deadlines, clients that leave", _mix),
        "scale": Scenario("chats on very many replicas", _scale, replicas=512, seconds=3600.0, policies=("ours",)),
    }
)
UNASKED = frozenset({"scale"})
"""Scenarios that are played only when they are named."""
