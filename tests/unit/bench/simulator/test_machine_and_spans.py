"""What a step costs, and that many steps at once cost what they cost one by one."""

from __future__ import annotations

import pytest

from text_generation_bench.simulator.machine import MACHINES, Machine
from text_generation_bench.simulator.shard import Span

PLAIN = Machine(
    base_s=1.0,
    per_prefill_token_s=0.1,
    per_row_s=0.01,
    per_context_token_s=0.001,
    per_pair_s=0.0001,
    slots=8,
    kv_tokens=1600,
    block_size=16,
    prefill_budget=64,
    target_itl_s=2.0,
    growth_tokens=40,
)


def test_a_step_costs_the_sum_of_what_is_in_it() -> None:
    assert PLAIN.step_s(10, 3, 100, 50) == pytest.approx(1.0 + 1.0 + 0.03 + 0.1 + 0.005)


def test_a_larger_request_leaves_room_for_fewer() -> None:
    for machine in MACHINES.values():
        assert machine.capacity(100, 100) > machine.capacity(400, 100) > machine.capacity(400, 200) > 0


def test_a_span_takes_as_long_as_its_steps_one_by_one() -> None:
    span = Span(5.0, 0.5, PLAIN.growth_s(4), 30, [])
    one_by_one = sum(PLAIN.step_s(0, 4, 100 + 4 * step, 0) - PLAIN.step_s(0, 4, 100, 0) + 0.5 for step in range(30))
    assert span.seconds(30) == pytest.approx(one_by_one)
    assert span.end == pytest.approx(5.0 + one_by_one)


@pytest.mark.parametrize("growth", [0.0, 1e-9, 0.01, 3.0])
def test_steps_until_a_time_are_those_that_are_over(growth: float) -> None:
    span = Span(2.0, 0.25, growth, 20, [])
    for done in range(21):
        boundary = span.start + span.seconds(done)
        assert span.steps_until(boundary + 1e-6) == done
        if done:
            assert span.steps_until(boundary - 1e-6) == done - 1
    assert span.steps_until(1e9) == 20
    assert span.steps_until(0.0) == 0


@pytest.mark.parametrize("growth", [0.0, 0.01])
def test_a_span_is_cut_at_the_first_boundary_that_is_not_before_the_time(growth: float) -> None:
    span = Span(2.0, 0.25, growth, 20, [])
    assert span.steps_to_boundary(2.0) == 1
    assert span.steps_to_boundary(2.0 + span.seconds(3) - 1e-6) == 3
    assert span.steps_to_boundary(2.0 + span.seconds(3) + 1e-6) == 4
    assert span.steps_to_boundary(1e9) == 20


def test_the_rest_of_a_span_ends_when_all_of_it_would_have() -> None:
    span = Span(2.0, 0.25, 0.01, 20, [])
    rest = span.after(7)
    assert rest.start == pytest.approx(2.0 + span.seconds(7))
    assert rest.steps == 13
    assert rest.end == pytest.approx(span.end)
