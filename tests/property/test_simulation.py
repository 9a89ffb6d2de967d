"""Random simulations with every KV block checked at every step violate no rule."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from text_generation_bench.simulator.config import LatencyTargets, Outage, SimConfig
from text_generation_bench.simulator.cost_model import CostModel
from text_generation_bench.simulator.simulator import Simulator
from text_generation_bench.simulator.traces import Arrival, TokenPool
from text_generation_router.request import Priority, TenantId
from text_generation_router.scheduling.policy import Dispatch, Policy

POOL = TokenPool(2)
COST_MODEL = CostModel(0.01, 0.0005, 0.0005, 1e-6, 1e-7, 4, 512, 8, 32, 0.03, 24)

machines = st.builds(
    lambda slots, blocks, budget, growth, host: replace(
        COST_MODEL,
        slots=slots,
        kv_tokens=8 * blocks,
        prefill_budget=budget,
        growth_tokens=growth,
        host_tokens=8 * host,
        copied_token_s=1e-4,
    ),
    st.integers(1, 6),
    st.integers(24, 64),
    st.integers(1, 64),
    st.integers(8, 64),
    st.sampled_from([0, 20, 200]),
)


@st.composite
def policies(draw: st.DrawFn, machine: CostModel) -> Policy:
    return Policy(
        max_batch_prefill_tokens=machine.prefill_budget,
        max_batch_size=draw(st.integers(1, machine.slots)),
        waiting_served_ratio=draw(st.sampled_from([0.0, 0.5])),
        max_waiting_tokens=draw(st.integers(1, 5)),
        target_itl_s=draw(st.sampled_from([None, 0.02, 0.05])),
        prefix_caching=draw(st.booleans()),
        dispatch=draw(st.sampled_from(list(Dispatch))),
        max_queued_tokens=draw(st.sampled_from([None, 300])),
        growth_tokens=machine.growth_tokens,
    )


def arrivals(random: Random, count: int, rate: float) -> list[Arrival]:
    """Return requests with shared prefixes, two tenants, all priorities, some deadlines and clients that leave."""
    prefixes = [POOL.text(random, length) for length in (8, 30, 64)]
    trace, at = [], 0.0
    for _ in range(count):
        at += random.expovariate(rate)
        prompt = random.choice([(), *prefixes]) + POOL.text(random, random.randint(1, 60))
        most = random.randint(1, 60)
        trace.append(
            Arrival(
                at,
                prompt,
                random.randint(1, most),
                most,
                POOL.answer_at(random),
                tenant=TenantId(random.choice(["", "one"])),
                priority=random.choice(list(Priority)),
                queue_s=random.choice([None, None, 0.3]),
                total_s=random.choice([None, None, 1.0]),
                leaves_after_s=random.choice([None, None, None, 0.2]),
            )
        )
    return trace


@given(data=st.data(), machine=machines, replicas=st.integers(1, 3), seed=st.integers(0, 1 << 30))
def test_simulation_violates_no_rule(data: st.DataObject, machine: CostModel, replicas: int, seed: int) -> None:
    random = Random(seed)
    trace = arrivals(random, 40, random.choice([3.0, 20.0, 100.0]))
    outages = [
        Outage(random.uniform(0, 2), random.randrange(replicas), random.uniform(0.01, 1)) for _ in range(seed % 3)
    ]
    config = SimConfig(
        machine,
        data.draw(policies(machine)),
        replicas,
        LatencyTargets(1.0, 0.05),
        POOL.ids,
        outages=sorted(outages, key=lambda outage: outage.at),
        with_fairness=True,
        audited=True,
        max_span_steps=random.choice([1, 1 << 20]),
    )
    simulation = Simulator(config)
    simulation.run(iter(trace))
    statistics = simulation.statistics
    ended = statistics.total.finished + statistics.rejected + statistics.cancelled + sum(statistics.failed.values())
    assert ended == len(trace)
