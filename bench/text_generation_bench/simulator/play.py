"""Play one scenario under one policy, and sum it up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from text_generation_bench.simulator.ledger import Figures, Ledger, Targets, Window
from text_generation_bench.simulator.machine import MACHINES
from text_generation_bench.simulator.policies import POLICIES
from text_generation_bench.simulator.scenarios import CUSTOMS, SCENARIOS, Scene, Setting
from text_generation_bench.simulator.setup import Setup
from text_generation_bench.simulator.timings import Timings
from text_generation_bench.simulator.tokens import TokenPool
from text_generation_bench.simulator.world import World

TTFT_TARGET_S = 2.0
WARMING_SHARE = 0.5
"""Share of the time before an overload that does not count where goodput is compared: replicas start empty."""
SETTLING_S = 5.0
"""Seconds of an overload that do not count: what came before it is still being answered."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to play."""

    scenario: str
    policy: str
    machine: str
    replicas: int
    seconds: float
    seed: int
    audited: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """What came of it. Times in seconds; rates are those of the time in which clients sent."""

    plan: Plan
    total: Figures
    kinds: Mapping[str, Figures]
    refused: int
    failed: int
    left: int
    """Clients that were gone before the end."""
    work_per_s: float
    """Tokens computed: prompt and new."""
    tokens_per_s: float
    """New tokens."""
    goodput: float
    """Tokens a second of requests whose client was served as the targets say."""
    goodput_by_second: tuple[int, ...]
    hit_rate: float | None
    ideal_hit_rate: float | None
    jain: float | None
    goodput_kept: float | None
    """Goodput while more was asked for than could be served, as a share of that just before."""
    preemptions: int
    moves: int
    foreseen_ratio: float | None
    busy: float
    """Share of the time that a replica was in a step."""
    events: int
    timings: Timings


def play(plan: Plan) -> Result:
    """Play it. Raises BrokenRule when the scheduler breaks a rule, KeyError for names that there are not."""
    machine = MACHINES[plan.machine]
    scenario = SCENARIOS[plan.scenario]
    machine = replace(machine, kv_tokens=int(machine.kv_tokens * scenario.kv_share))
    pool = TokenPool(plan.seed)
    setting = Setting(machine, CUSTOMS[plan.machine], plan.replicas, plan.seconds, plan.seed, pool)
    scene = scenario.build(setting)
    contender = POLICIES[plan.policy](machine, scene.most_queued)
    world = World(
        Setup(
            machine=machine,
            policy=contender.policy,
            replicas=plan.replicas,
            targets=Targets(TTFT_TARGET_S, machine.target_itl_s),
            ids=pool.ids,
            until=plan.seconds,
            outages=scene.outages,
            blind=contender.blind,
            with_fairness=scene.with_fairness,
            audited=plan.audited,
        )
    )
    world.run(scene.trace)
    return _summed_up(plan, world, scene)


def _summed_up(plan: Plan, world: World, scene: Scene) -> Result:
    ledger, scheduler = world.ledger, world.scheduler
    seconds = int(plan.seconds)
    goodput = [window.good_tokens for window in ledger.windows[:seconds]]
    return Result(
        plan=plan,
        total=ledger.total,
        kinds=dict(sorted(ledger.kinds.items())),
        refused=ledger.refused,
        failed=sum(ledger.failed.values()),
        left=ledger.cancelled,
        work_per_s=ledger.rate(_work, 0, plan.seconds),
        tokens_per_s=ledger.rate(_tokens, 0, plan.seconds),
        goodput=ledger.rate(_good_tokens, 0, plan.seconds),
        goodput_by_second=(*goodput, *[0] * (seconds - len(goodput))),
        hit_rate=scheduler.hit_tokens / scheduler.prompt_tokens if world.reuses and scheduler.prompt_tokens else None,
        ideal_hit_rate=world.ideal.hit_rate,
        jain=world.fairness.jain if world.fairness is not None else None,
        goodput_kept=_goodput_kept(ledger, scene),
        preemptions=scheduler.preemptions,
        moves=scheduler.moves,
        foreseen_ratio=ledger.foreseen_ratio,
        busy=ledger.busy_s / plan.replicas / max(plan.seconds, len(ledger.windows)),
        events=world.events,
        timings=world.timings,
    )


def _goodput_kept(ledger: Ledger, scene: Scene) -> float | None:
    if scene.overload is None:
        return None
    start, end = scene.overload
    before = ledger.rate(_good_tokens, start * WARMING_SHARE, start)
    return ledger.rate(_good_tokens, start + SETTLING_S, end) / before if before else None


def _work(window: Window) -> int:
    return window.prefilled + window.tokens


def _tokens(window: Window) -> int:
    return window.tokens


def _good_tokens(window: Window) -> int:
    return window.good_tokens
