"""Run one scenario under one policy and summarize it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from text_generation_bench.simulator.config import POLICIES, LatencyTargets, SimConfig
from text_generation_bench.simulator.cost_model import MACHINES
from text_generation_bench.simulator.measures import DurationHistogram
from text_generation_bench.simulator.scenarios import SCENARIOS, WORKLOAD_SIZES, ScenarioInput, ScenarioLoad
from text_generation_bench.simulator.simulator import Simulator
from text_generation_bench.simulator.statistics import RequestStats, SchedulerTimings, SecondStats, Statistics
from text_generation_bench.simulator.traces import TokenPool

TTFT_TARGET_S = 2.0
WARM_UP_SHARE = 0.5
"""Fraction of the time before an overload that is not compared: replicas start empty."""
SETTLING_S = 5.0
"""First seconds of an overload, which are not compared: earlier requests still run."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """A scenario under a policy."""

    scenario: str
    policy: str
    machine: str
    replicas: int
    seconds: float
    seed: int
    audited: bool = False
    prefill_replicas: int = 1
    """Replicas that compute prompts, under a policy with two roles."""


@dataclass(frozen=True, slots=True)
class ExperimentResult:
    """The results of an experiment. Rates are over the time in which clients sent."""

    experiment: Experiment
    total: RequestStats
    kinds: Mapping[str, RequestStats]
    rejected: int
    failed: int
    left: int
    """Requests whose client left."""
    work_per_s: float
    """Computed prompt tokens and new tokens, per second."""
    tokens_per_s: float
    """New tokens per second."""
    goodput: float
    """New tokens per second of requests within the latency targets."""
    goodput_by_second: tuple[int, ...]
    hit_rate: float | None
    ideal_hit_rate: float | None
    jain: float | None
    goodput_kept: float | None
    """Goodput during the overload over goodput just before it."""
    jobs: int
    job_s: float | None
    """Mean time of a job, from its first request to the end of its last one."""
    per_token: DurationHistogram
    """Seconds from arrival to end over new tokens, of each request."""
    preemptions: int
    moves: int
    queue_time_ratio: float | None
    busy: float
    """Fraction of the time that a replica was in a step."""
    replica_hours: float
    events: int
    timings: SchedulerTimings


def run_experiment(experiment: Experiment) -> ExperimentResult:
    """Run an experiment. Raises RuleViolation if the scheduler violates a rule, KeyError for unknown names."""
    cost_model = MACHINES[experiment.machine]
    scenario = SCENARIOS[experiment.scenario]
    cost_model = replace(cost_model, kv_tokens=int(cost_model.kv_tokens * scenario.kv_share))
    pool = TokenPool(experiment.seed)
    load = scenario.build(
        ScenarioInput(
            cost_model,
            WORKLOAD_SIZES[experiment.machine],
            experiment.replicas,
            experiment.seconds,
            experiment.seed,
            pool,
        )
    )
    variant = POLICIES[experiment.policy](cost_model, load.max_queued_tokens)
    if variant.policy.prefill_replicas:
        variant = replace(variant, policy=replace(variant.policy, prefill_replicas=experiment.prefill_replicas))
    host_tokens = int(variant.host_share * cost_model.kv_tokens * experiment.replicas)
    cost_model = replace(cost_model, host_tokens=host_tokens)
    simulator = Simulator(
        SimConfig(
            cost_model=cost_model,
            policy=variant.policy,
            replicas=experiment.replicas,
            targets=LatencyTargets(TTFT_TARGET_S, cost_model.target_itl_s),
            ids=pool.ids,
            until=experiment.seconds,
            outages=load.outages,
            blind=variant.blind,
            scheduler=variant.scheduler,
            scaling=variant.scaling,
            with_fairness=load.with_fairness,
            audited=experiment.audited,
        )
    )
    simulator.run(load.trace)
    return _summarize(experiment, simulator, load)


def _summarize(experiment: Experiment, simulator: Simulator, load: ScenarioLoad) -> ExperimentResult:
    statistics, stats = simulator.statistics, simulator.scheduler.stats()
    reuse = simulator.config.policy.prefix_caching
    seconds = int(experiment.seconds)
    goodput = [second.good_tokens for second in statistics.seconds[:seconds]]
    return ExperimentResult(
        experiment=experiment,
        total=statistics.total,
        kinds=dict(sorted(statistics.kinds.items())),
        rejected=statistics.rejected,
        failed=sum(statistics.failed.values()),
        left=statistics.cancelled,
        work_per_s=statistics.rate(_work, 0, experiment.seconds),
        tokens_per_s=statistics.rate(_tokens, 0, experiment.seconds),
        goodput=statistics.rate(_good_tokens, 0, experiment.seconds),
        goodput_by_second=(*goodput, *[0] * (seconds - len(goodput))),
        hit_rate=stats.hit_tokens / stats.prompt_tokens if reuse and stats.prompt_tokens else None,
        ideal_hit_rate=simulator.ideal.hit_rate,
        jain=simulator.fairness.jain if simulator.fairness is not None else None,
        goodput_kept=_goodput_kept(statistics, load),
        jobs=len(statistics.jobs),
        job_s=fmean(end - start for start, end in statistics.jobs.values()) if statistics.jobs else None,
        per_token=statistics.per_token,
        preemptions=stats.preemptions,
        moves=stats.moves,
        queue_time_ratio=statistics.queue_time_ratio,
        busy=statistics.busy_s / simulator.replica_seconds,
        replica_hours=simulator.replica_seconds / 3600,
        events=simulator.events,
        timings=simulator.timings,
    )


def _goodput_kept(statistics: Statistics, load: ScenarioLoad) -> float | None:
    if load.overload is None:
        return None
    start, end = load.overload
    before = statistics.rate(_good_tokens, start * WARM_UP_SHARE, start)
    return statistics.rate(_good_tokens, start + SETTLING_S, end) / before if before else None


def _work(second: SecondStats) -> int:
    return second.prefilled + second.tokens


def _tokens(second: SecondStats) -> int:
    return second.tokens


def _good_tokens(second: SecondStats) -> int:
    return second.good_tokens
