"""The scenarios: clients, load, outages and defaults, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import merge
from itertools import count
from operator import attrgetter
from random import Random
from types import MappingProxyType

from text_generation_bench.load.agents import SYSTEM_TOKENS, AgentTurn, draw_session
from text_generation_bench.simulator.config import Outage
from text_generation_bench.simulator.cost_model import CostModel
from text_generation_bench.simulator.traces import (
    AgentSource,
    ChatProfile,
    ClientProfile,
    RequestSizes,
    TokenPool,
    Trace,
    busy_clients,
    chats,
    phased_times,
    poisson_times,
    shared_prefixes,
    system_prompts,
    unrelated_requests,
)
from text_generation_router.request import Priority, TenantId

LONG = "long"
"""Label of the long prompts among short ones."""
PEAK_SHARE = 0.6
"""Fraction of the capacity of all replicas at the busiest hour of a day."""
AGENT_LOAD = 0.8
"""Fraction of the capacity of all replicas that agents take, if all that was sent before is cached."""
AGENT_TOKENS = 65_536
"""Longest prompt of other scenarios on the machine for which the texts of agents have their full length."""
QUEUE_S = 1.0
"""Length of a bounded queue, in seconds of work."""


@dataclass(frozen=True, slots=True)
class WorkloadSizes:
    """Sizes of requests that suit a machine."""

    question: RequestSizes
    turn: RequestSizes
    reasoning: RequestSizes
    system_tokens: int
    long_prompt: int
    longest_chat: int


WORKLOAD_SIZES: Mapping[str, WorkloadSizes] = MappingProxyType(
    {
        "cpu-135m": WorkloadSizes(
            RequestSizes((20, 160), 48, 160),
            RequestSizes((10, 60), 32, 96),
            RequestSizes((20, 160), 48, 160),
            256,
            2000,
            1500,
        ),
        "h200-8b": WorkloadSizes(
            RequestSizes((200, 800), 100, 512),
            RequestSizes((50, 300), 100, 512),
            RequestSizes((1000, 4000), 3000, 12_000),
            2000,
            65_536,
            8000,
        ),
    }
)


@dataclass(frozen=True, slots=True)
class ScenarioInput:
    """The parameters that a scenario is built from."""

    cost_model: CostModel
    sizes: WorkloadSizes
    replicas: int
    seconds: float
    seed: int
    pool: TokenPool

    def random(self, name: str) -> Random:
        """Return a separate random generator for a source of requests."""
        return Random(f"{self.seed}/{name}")

    def rate(self, share: float, sizes: RequestSizes, before: int = 0) -> float:
        """Return the request rate at a fraction of the capacity of all replicas; `before`: tokens before each prompt."""
        return share * self.replicas * self.cost_model.capacity(before + sizes.prompt_mean, sizes.new_mean)


@dataclass(frozen=True, slots=True)
class ScenarioLoad:
    """The load of one run."""

    trace: Trace
    outages: Sequence[Outage] = ()
    max_queued_tokens: int | None = None
    """Most tokens in the queue."""
    overload: tuple[float, float] | None = None
    """Start and end of the overload."""
    with_fairness: bool = False


@dataclass(frozen=True, slots=True)
class Scenario:
    """A named workload."""

    summary: str
    build: Callable[[ScenarioInput], ScenarioLoad]
    replicas: int = 4
    seconds: float = 60.0
    kv_share: float = 1.0
    """Fraction of the machine's KV cache that is available."""
    policies: Sequence[str] = ("ours", "no-reuse", "least-loaded", "round-robin", "random", "tgi")


def _poisson(source: ScenarioInput, share: float = 0.7) -> ScenarioLoad:
    sizes, random = source.sizes.question, source.random("poisson")
    times = poisson_times(random, source.rate(share, sizes), 0.0, source.seconds)
    return ScenarioLoad(unrelated_requests(source.pool, random, times, sizes))


def _bursts(source: ScenarioInput) -> ScenarioLoad:
    sizes, random = source.sizes.question, source.random("bursts")
    on, off = source.rate(2.0, sizes), source.rate(0.1, sizes)
    phases = [(5.0, on), (15.0, off)] * max(1, round(source.seconds / 20))
    return ScenarioLoad(unrelated_requests(source.pool, random, phased_times(random, phases), sizes))


def _prefixes(source: ScenarioInput) -> ScenarioLoad:
    sizes, length, random = source.sizes.turn, source.sizes.system_tokens, source.random("prefixes")
    # Together they exceed the cache of one replica.
    count = max(8, round(1.5 * source.cost_model.kv_tokens / length))
    systems = system_prompts(source.pool, random, count, length)
    times = poisson_times(random, source.rate(0.9, sizes, length), 0.0, source.seconds)
    return ScenarioLoad(shared_prefixes(source.pool, random, times, sizes, systems))


def _steady(source: ScenarioInput) -> ScenarioLoad:
    sizes, random = source.sizes.question, source.random("steady")
    times = poisson_times(random, source.rate(0.3, sizes), 0.0, source.seconds)
    return ScenarioLoad(unrelated_requests(source.pool, random, times, sizes))


def _long(source: ScenarioInput) -> ScenarioLoad:
    workload, random = source.sizes, source.random("long")
    sizes = RequestSizes(
        (workload.long_prompt, workload.long_prompt), workload.question.new_mean, workload.question.max_new_tokens
    )
    rate = source.rate(0.2, sizes)
    times = poisson_times(random, rate, 0.0, source.seconds)
    books = unrelated_requests(source.pool, random, times, sizes, ClientProfile(kind=LONG))
    return ScenarioLoad(_merge(_steady(source).trace, books))


def _documents(source: ScenarioInput) -> ScenarioLoad:
    workload, random = source.sizes, source.random("documents")
    lengths = workload.long_prompt // 32, workload.long_prompt // 4
    sizes = RequestSizes(lengths, workload.question.new_mean, workload.question.max_new_tokens)
    times = poisson_times(random, source.rate(0.7, sizes), 0.0, source.seconds)
    return ScenarioLoad(unrelated_requests(source.pool, random, times, sizes))


def _reasoning(source: ScenarioInput) -> ScenarioLoad:
    sizes, random = source.sizes.reasoning, source.random("reasoning")
    times = poisson_times(random, source.rate(0.7, sizes), 0.0, source.seconds)
    return ScenarioLoad(unrelated_requests(source.pool, random, times, sizes))


def _chats(source: ScenarioInput, share: float = 0.6) -> ScenarioLoad:
    workload, random = source.sizes, source.random("chats")
    profile = ChatProfile(workload.turn, turns_mean=6.0, think_mean_s=8.0, longest=workload.longest_chat)
    systems = system_prompts(source.pool, random, 8, workload.system_tokens // 4)
    rate = source.rate(share, workload.turn, workload.system_tokens // 4) / profile.turns_mean
    times = poisson_times(random, rate, 0.0, source.seconds)
    return ScenarioLoad(chats(source.pool, random, times, profile, systems))


def _tenants(source: ScenarioInput) -> ScenarioLoad:
    sizes = source.sizes.question
    low, high = sizes.prompt[0] // 2, sizes.prompt[1] // 2
    short = RequestSizes((low, high), sizes.new_mean, sizes.max_new_tokens)
    tall = RequestSizes((8 * low, 8 * high), sizes.new_mean, sizes.max_new_tokens)
    clients = 2 * source.cost_model.slots * source.replicas
    light = busy_clients(
        source.pool,
        source.random("light"),
        clients,
        short,
        source.seconds,
        ClientProfile(TenantId("light"), kind="light"),
    )
    heavy = busy_clients(
        source.pool,
        source.random("heavy"),
        10 * clients,
        tall,
        source.seconds,
        ClientProfile(TenantId("heavy"), kind="heavy"),
    )
    return ScenarioLoad(_merge(light, heavy), with_fairness=True)


def _overload(source: ScenarioInput) -> ScenarioLoad:
    sizes, random = source.sizes.question, source.random("overload")
    before, during = source.seconds / 4, source.seconds / 2
    full = source.rate(1.0, sizes)
    phases = [(before, 0.95 * full), (during, 3.0 * full), (before, 0.5 * full)]
    most = QUEUE_S * full * (sizes.prompt_mean + sizes.new_mean)
    return ScenarioLoad(
        unrelated_requests(source.pool, random, phased_times(random, phases), sizes),
        max_queued_tokens=int(most),
        overload=(before, before + during),
    )


def _failures(source: ScenarioInput) -> ScenarioLoad:
    outages = []
    at, replica = 5.0, 0
    while at < source.seconds:
        outages.append(Outage(at, replica % source.replicas, 10.0))
        at, replica = at + 12.5, replica + 1
    return ScenarioLoad(_chats(source, share=0.5).trace, outages=outages)


def _mix(source: ScenarioInput) -> ScenarioLoad:
    workload, pool = source.sizes, source.pool
    shop = ClientProfile(
        TenantId("shop"), Priority.INTERACTIVE, queue_s=10.0, patience_s=5.0, leaving=0.05, kind="shop"
    )
    batch = ClientProfile(TenantId("batch"), Priority.BULK, kind="batch")
    lab = ClientProfile(TenantId("lab"), total_s=60.0, kind=LONG)
    long = RequestSizes(
        (workload.long_prompt // 4, workload.long_prompt), workload.question.new_mean, workload.question.max_new_tokens
    )
    random = source.random("mix")
    systems = system_prompts(pool, random, 32, workload.system_tokens)
    questions = poisson_times(random, source.rate(0.25, workload.turn, workload.system_tokens), 0.0, source.seconds)
    books = source.random("books")
    bulk = source.random("bulk")
    on = source.rate(1.0, workload.question)
    phases = [(10.0, 0.0), (10.0, on)] * max(1, round(source.seconds / 20))
    return ScenarioLoad(
        _merge(
            _chats(source, share=0.25).trace,
            shared_prefixes(pool, random, questions, workload.turn, systems, shop),
            unrelated_requests(
                pool, books, poisson_times(books, source.rate(0.05, long), 0.0, source.seconds), long, lab
            ),
            unrelated_requests(pool, bulk, phased_times(bulk, phases), workload.question, batch),
        )
    )


def _scale(source: ScenarioInput) -> ScenarioLoad:
    random, workload = source.random("scale"), source.sizes
    # 0.4 requests per second and replica; most prompts have 200 to 800 tokens and grow during a chat.
    profile = ChatProfile(
        RequestSizes((50, 200), 100, 512), turns_mean=3.0, think_mean_s=10.0, longest=workload.longest_chat
    )
    systems = system_prompts(source.pool, random, 64, 150)
    times = poisson_times(random, 0.4 * source.replicas / 2.9, 0.0, source.seconds)
    return ScenarioLoad(chats(source.pool, random, times, profile, systems))


def _autoscale(source: ScenarioInput) -> ScenarioLoad:
    sizes, random = source.sizes.reasoning, source.random("autoscale")
    peak, phase = source.rate(PEAK_SHARE, sizes), source.seconds / 24 / 12
    rates = [peak * _share_of_peak(at / 12) * random.uniform(0.85, 1.15) for at in range(24 * 12)]
    times = phased_times(random, [(phase, rate) for rate in rates])
    return ScenarioLoad(unrelated_requests(source.pool, random, times, sizes))


def _share_of_peak(hour: float) -> float:
    """Return the rate at an hour of the day over its largest: a tenth at night, two humps with a break at noon."""
    morning, evening = math.exp(-(((hour - 10.5) / 2.2) ** 2)), math.exp(-(((hour - 16.0) / 3.0) ** 2))
    return min(1.0, 0.1 + 0.85 * morning + 0.9 * evening)


def _agents(source: ScenarioInput, target_every: int = 0) -> ScenarioLoad:
    random, model = source.random("agents"), source.cost_model
    scale = source.sizes.long_prompt / AGENT_TOKENS
    systems = system_prompts(source.pool, random, 4, max(1, round(scale * SYSTEM_TOKENS)))
    sample = [draw_session(random, scale) for _ in range(100)]
    busy = sum(_busy_s(model, turn, context) for each in sample for turn, context in each.contexts()) / len(sample)
    times = poisson_times(random, AGENT_LOAD * source.replicas / busy, 0.0, source.seconds)
    drawn = (draw_session(source.random(f"session {number}"), scale) for number in count())
    return ScenarioLoad(AgentSource(source.pool, source.random("texts"), systems, target_every).sessions(times, drawn))


def _busy_s(model: CostModel, turn: AgentTurn, context: int) -> float:
    """Return the seconds of a replica that a turn takes if all before it is cached, in a batch as large as the cache allows."""
    batch = max(1.0, min(model.slots, model.kv_tokens / (context + turn.new_tokens)))
    prefill = turn.added * (model.per_prefill_token_s + model.per_pair_s * context)
    return prefill + turn.new_tokens * (model.base_s / batch + model.per_row_s + model.per_context_token_s * context)


def _users(source: ScenarioInput) -> ScenarioLoad:
    sizes = source.sizes.question
    users = source.cost_model.slots * source.replicas
    clients = (
        busy_clients(
            source.pool,
            source.random(f"user {user}"),
            1 if user % 2 else 16,
            sizes,
            source.seconds,
            ClientProfile(kind="1 agent" if user % 2 else "16 sub-agents", job=f"user {user}"),
        )
        for user in range(users)
    )
    return ScenarioLoad(_merge(*clients), with_fairness=True)


def _merge(*traces: Trace) -> Trace:
    return iter(merge(*traces, key=attrgetter("at")))


SCENARIOS: Mapping[str, Scenario] = MappingProxyType(
    {
        "poisson": Scenario("unrelated requests at 0.7 of capacity", _poisson),
        "bursts": Scenario("5 s at twice the capacity, then 15 s at a tenth of it", _bursts),
        "tight": Scenario(
            "unrelated requests at 0.8 of capacity, with a fortieth of the KV cache",
            partial(_poisson, share=0.8),
            kv_share=1 / 40,
            policies=("ours", "no-reuse", "tgi"),
        ),
        "prefixes": Scenario("system prompts by Zipf, more than one replica can cache", _prefixes),
        "chats": Scenario("chats of six turns, each prompt contains the chat so far", _chats),
        "steady": Scenario("the short requests of `long`, alone", _steady, policies=("ours", "no-target", "tgi")),
        "long": Scenario(
            "short requests with occasional very long prompts", _long, policies=("ours", "no-target", "tgi")
        ),
        "documents": Scenario(
            "long prompts with short answers at 0.7 of capacity",
            _documents,
            policies=("ours", "no-target", "host-cache", "two-roles"),
        ),
        "reasoning": Scenario(
            "questions with long answers at 0.7 of capacity", _reasoning, policies=("ours", "no-target", "two-roles")
        ),
        "tenants": Scenario(
            "two backlogged tenants: 10 times the clients, 8 times the prompts",
            _tenants,
            replicas=1,
            policies=("ours", "fcfs", "tgi"),
        ),
        "agents": Scenario(
            "sessions of coding agents at 0.8 of capacity, whose contexts exceed the KV cache",
            _agents,
            replicas=2,
            seconds=7200.0,
            kv_share=1 / 4,
            policies=("ours", "fcfs", "host-cache"),
        ),
        "targets": Scenario(
            "the same, a fourth of them with a target of 30 s for the first token",
            partial(_agents, target_every=4),
            seconds=7200.0,
            kv_share=1 / 4,
            policies=("ours",),
        ),
        "users": Scenario(
            "as many users as slots, all busy: half of them with one agent, half with 16 sub-agents",
            _users,
            replicas=1,
            seconds=300.0,
            policies=("ours", "fcfs"),
        ),
        "overload": Scenario(
            "three times the capacity for half of the time", _overload, seconds=240.0, policies=("ours", "tgi")
        ),
        "failures": Scenario(
            "chats; every 12.5 s a replica is lost for 10 s", _failures, policies=("ours", "round-robin", "tgi")
        ),
        "mix": Scenario("all at once: tenants, priorities, deadlines, clients that leave", _mix),
        "autoscale": Scenario(
            "a day of questions with long answers; replicas start in two minutes",
            _autoscale,
            replicas=5,
            seconds=86_400.0,
            kv_share=1 / 10,
            policies=("ours", "signals", "cpu", "queue-length"),
        ),
        "scale": Scenario("chats on many replicas", _scale, replicas=512, seconds=3600.0, policies=("ours",)),
    }
)
ONLY_BY_NAME = frozenset({"autoscale", "scale"})
"""Scenarios that `all` does not include."""
