"""Random policies, replicas, requests and events for a `SchedulerWorld`, drawn from a `random.Random` or the like."""

from __future__ import annotations

from random import Random

from host_ledger import HostBlocks
from replica_world import EOS, FAILING_STEP_TOKEN, FAILING_TOKEN, ReplicaSetup
from scheduler_world import SchedulerWorld

from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.values import Grammar, GrammarKind, LogprobOptions
from text_generation_router.request import Priority, QualityOfService, Request, RequestId, TenantId
from text_generation_router.scheduling.policy import Dispatch, Policy

LONGEST_PROMPT = 180
_COMMON = tuple(10 + i % 37 for i in range(LONGEST_PROMPT))
_BASES = (
    _COMMON,
    _COMMON[:100] + tuple(50 + i % 11 for i in range(80)),
    _COMMON[:32] + tuple(70 + i % 7 for i in range(148)),
    tuple(90 + i % 5 for i in range(LONGEST_PROMPT)),
)
"""Prompts that share 180, 100, 32 and 0 leading tokens with the first."""
SPECIAL = (EOS, FAILING_TOKEN, FAILING_STEP_TOKEN)


def draw_world(draw: Random) -> SchedulerWorld:
    """Return a world with a random policy and one to three replicas, at least two of them if they have roles."""
    budget = draw.choice([1, 16, 64, 200, 400])
    batch = draw.randint(1, 6)
    policy = Policy(
        max_batch_prefill_tokens=budget,
        max_batch_size=batch,
        waiting_served_ratio=draw.choice([0.0, 0.0, 0.3, 1.2]),
        max_waiting_tokens=draw.randint(0, 5),
        target_itl_s=draw.choice([None, None, 0.0005, 0.002, 0.01]),
        prefix_caching=draw.choice([True, True, True, False]),
        dispatch=draw.choice(list(Dispatch)),
        tenant_weights={TenantId("a"): draw.choice([0.5, 1.0, 4.0])},
        max_queued_tokens=draw.choice([None, None, 300, 2000]),
        max_request_moves=draw.randint(0, 3),
        growth_tokens=draw.choice([0, 8, 40, 100]),
        prefill_replicas=draw.choice([0, 0, 1, 2]),
    )
    roles = policy.prefill_replicas
    self_scheduling = not roles and draw.choice([False, False, True])
    groups = None if self_scheduling else draw_groups(draw) if roles else draw.choice([None, draw_groups(draw)])
    host = None if groups is None else HostBlocks(*(draw.randint(3, 30) for _ in range(1 + len(groups))))
    replicas = [
        ReplicaSetup(
            blocks=draw_blocks(draw),
            slots=draw.randint(1, 6),
            self_scheduling=self_scheduling,
            reserves_max_length=draw.choice([False, False, False, True]),
            tokens_per_report=draw.choice([1, 3, 8]),
            max_batch_size=batch,
            max_batch_prefill_tokens=budget,
            adapters=draw.choice(["", "sql", "sql,french", "sql,french,code"]),
            max_loras=draw.choice([0, 1, 2]),
            further_groups=() if self_scheduling else draw_groups(draw) if groups is None else groups,
            host=host,
        )
        for _ in range(draw.randint(2 if roles else 1, 3))
    ]
    return SchedulerWorld(policy, replicas)


def draw_blocks(draw: Random) -> int:
    """Return the size of a KV pool, mostly too small for the traffic."""
    return draw.randint(6, 30)


def draw_groups(draw: Random) -> tuple[CacheGroup, ...]:
    """Return up to two window groups and one of states, with blocks for one to a few sequences."""
    windows = draw.choice([(), (), (33,), (1,), (16,), (20, 64), (90, 17)])
    groups = tuple(CacheGroup(draw.randint(2, 24), window) for window in windows)
    states = CacheGroup(draw.randint(2, 12), is_state=True)
    return draw.choice([groups, (*groups, states)])


def draw_request(world: SchedulerWorld, draw: Random) -> Request:
    length = draw.choice([draw.randint(1, 40), draw.randint(1, LONGEST_PROMPT), draw.randint(100, LONGEST_PROMPT)])
    tail = tuple(draw.randint(10, 12) for _ in range(draw.choice([0, 1, 1, 20])))
    special = draw.choice([()] * 12 + [(token,) for token in SPECIAL])
    deadlines = draw.choice(["none"] * 8 + ["first", "queue", "end", "all"])
    seconds = draw.choice([0.0, 0.5, 3.0, 30.0])

    def by(kind: str, after_s: float) -> float | None:
        return world.now + after_s if deadlines in (kind, "all") else None

    prompt = draw.choice(_BASES)[:length] + special + tail
    return Request(
        RequestId(len(world.views)),
        prompt=prompt,
        turn_ends=tuple(draw.randint(0, len(prompt)) for _ in range(draw.choice([0, 1, 2]))),
        max_new_tokens=draw.choice([1, 2, 17, 40, 90, 200]),
        logprobs=LogprobOptions(prompt=draw.choice([False] * 7 + [True])),
        ignore_eos=draw.choice([True, False]),
        grammar=draw.choice([Grammar(GrammarKind.REGEX, "a+"), None, None]),
        adapter=draw.choice(["", "", "", "sql", "french", "code"]),
        qos=QualityOfService(
            TenantId(draw.choice(["", "a", "b"])),
            draw.choice([Priority.DEFAULT, *Priority]),
            draw.choice(["", "", "", "pepper"]),
            first_token_by=by("first", seconds - 1.0),
            queue_by=by("queue", seconds),
            end_by=by("end", seconds * 2),
        ),
    )


MAX_REPLICAS = 12
"""More than a small fleet."""
ACTIONS = ("dispatch", "schedule", "arrive", "step", "step", "report", "round", "round", "round")


def act(world: SchedulerWorld, action: str, replica: int) -> None:
    """Do one action of the router, the network or a shard; a round is one of each, without delays."""
    replica = pick(world, replica)
    match action:
        case "dispatch":
            world.dispatch()
        case "schedule":
            world.schedule(replica)
        case "arrive":
            world.orders_arrive(replica)
        case "step":
            world.step(replica)
        case "report":
            world.reports_arrive(replica)
        case "round":
            for each in ("dispatch", "schedule", "arrive", "step", "report"):
                act(world, each, list(world.replicas).index(replica))


def pick(world: SchedulerWorld, number: int) -> int:
    """Return the number of a replica."""
    return list(world.replicas)[number % len(world.replicas)]


def draw_request_id(world: SchedulerWorld, draw: Random) -> RequestId:
    """Return any request so far, more often a live or a placed one."""
    which = draw.choice(["placed", "live", "live", "any"])
    if which == "placed" and (placed := world.placed):
        return draw.choice(placed)
    if which != "any" and world.live:
        return draw.choice(list(world.live))
    return RequestId(draw.randint(0, len(world.views) - 1))


def random_event(world: SchedulerWorld, draw: Random, max_live: int = 30) -> None:
    """Do one event: mostly an action, at times one of a client, of the clock or of a failing replica."""
    chance = draw.random()
    if chance < 0.92:
        act(world, draw.choice(ACTIONS), draw.randrange(len(world.replicas)))
    elif chance < 0.96:
        for _ in range(min(draw.choice([1, 1, 2, 5]), max_live - len(world.live))):
            world.submit(draw_request(world, draw))
    elif chance < 0.975:
        if world.views:
            world.cancel(draw_request_id(world, draw), draw.choice([True, False]))
    elif chance < 0.988:
        world.pass_time(draw.choice([0.0, 0.001, 0.01, 0.2]))
    else:
        disturb(world, draw.choice(DISTURBANCES), draw.randrange(len(world.replicas)), draw)


DISTURBANCES = [
    "lose",
    "lose",
    "open",
    "open",
    "open",
    "open smaller",
    "drain",
    "undrain",
    "undrain",
    "add",
    "remove",
    "restart",
    "spoil",
    "spoil",
]


def disturb(world: SchedulerWorld, event: str, replica: int, draw: Random) -> None:
    """Let a replica come, go or pause, or the scheduler restart."""
    replica = pick(world, replica)
    match event:
        case "lose":
            world.lose(replica)
        case "open":
            world.open(replica)
        case "open smaller":
            world.open(replica, draw_blocks(draw))
        case "add":
            for _ in range(min(draw.choice([1, 1, 8]), MAX_REPLICAS - len(world.replicas))):
                world.add(replica)
        case "remove":
            world.remove(replica)
        case "restart":
            world.restart(draw.choice([True, False]))
        case "spoil":
            world.spoil(draw)
        case "drain" | "undrain":
            world.drain(replica, event == "drain")


CHECK_EVERY = 8
"""Events between two checks of all invariants."""


def play(seed: int, events: int) -> SchedulerWorld:
    """Play a random world to its end and return it. An exception gets a note with the seed and the event."""
    draw = Random(seed)
    world = draw_world(draw)
    event = 0
    try:
        for event in range(events):
            random_event(world, draw)
            if event % CHECK_EVERY == 0:
                world.check()
        world.finish()
    except Exception as error:
        error.add_note(f"in world {seed}, at event {event} of {events}")
        raise
    return world
