"""What steps cost, learned from engines whose true cost is known, with noise and accidents."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from text_generation_router.scheduling.step_cost import StepCost, StepShape


@dataclass(frozen=True)
class Engine:
    """Seconds: a fixed part, and so much a prompt token, a decoding row, a token of context, an attention pair."""

    fixed: float
    token: float
    row: float
    context: float
    pair: float

    def seconds(self, shape: StepShape) -> float:
        return (
            self.fixed
            + self.token * shape.prefill_tokens
            + self.row * shape.decode_rows
            + self.context * shape.decode_context
            + self.pair * shape.prefill_pairs
        )


GPU = Engine(4e-3, 15e-6, 20e-6, 30e-9, 0.6e-9)
CPU = Engine(22e-3, 0.9e-3, 1.5e-3, 0.3e-6, 0.1e-6)
ENGINES = pytest.mark.parametrize("engine", [GPU, CPU], ids=["gpu", "cpu"])
SEEDS = pytest.mark.parametrize("seed", range(3))

PROMPT = StepShape(500, 0, 0, 125_000)
DECODE = StepShape(0, 8, 3_000, 0)
MIXED = StepShape(200, 8, 3_000, 20_000)


def a_shape(tokens: int, rows: int, context: int = 0, start: int = 0) -> StepShape:
    return StepShape(tokens, rows, context, tokens * start + tokens * tokens // 2)


class Machine:
    """An engine whose steps scatter by a tenth, and now and then take five times as long."""

    def __init__(self, engine: Engine, seed: int, accidents: float = 0.003) -> None:
        self.engine = engine
        self.slowness = 1.0
        self.accidents = accidents
        self.rng = random.Random(seed)
        self.cost = StepCost()

    def step(self, shape: StepShape) -> float:
        noise = max(0.5, self.rng.gauss(1.0, 0.1)) * (5.0 if self.rng.random() < self.accidents else 1.0)
        seconds = self.engine.seconds(shape) * self.slowness * noise
        self.cost.observe(shape, seconds)
        return seconds

    def steps(self, count: int, *, prompts: bool) -> None:
        for _ in range(count):
            rows = self.rng.randint(1, 64)
            tokens = self.rng.choice([0, self.rng.randint(20, 500)]) if prompts else 0
            self.step(a_shape(tokens, rows, rows * self.rng.randint(100, 900)))

    def ratio(self, shape: StepShape) -> float:
        """Foreseen over true."""
        return self.cost.predict(shape) / (self.engine.seconds(shape) * self.slowness)


def test_nothing_is_foreseen_before_the_first_step() -> None:
    cost = StepCost()
    assert not cost.ready
    assert cost.predict(MIXED) == 0.0
    assert cost.budget(8, 3_000, 0, 10.0) == 0


def test_ready_once_a_prompt_was_computed() -> None:
    cost = StepCost()
    cost.observe(DECODE, 0.02)
    assert not cost.ready
    cost.observe(MIXED, 0.05)
    assert cost.ready


@ENGINES
@pytest.mark.parametrize("first", [[PROMPT, DECODE], [DECODE, PROMPT]], ids=["prompt first", "decode first"])
def test_two_steps_are_enough_for_a_sensible_guess(engine: Engine, first: list[StepShape]) -> None:
    cost = StepCost()
    for shape in first:
        cost.observe(shape, engine.seconds(shape))
    for shape in (PROMPT, DECODE, MIXED, a_shape(1_000, 8, 3_000), a_shape(0, 64, 20_000), a_shape(50, 1, 100)):
        assert 0.5 < cost.predict(shape) / engine.seconds(shape) < 2.0


@ENGINES
@SEEDS
def test_noise_and_accidents_leave_every_kind_of_step_foreseen(engine: Engine, seed: int) -> None:
    machine = Machine(engine, seed, accidents=0.01)
    machine.steps(400, prompts=True)
    for shape in (DECODE, MIXED, a_shape(500, 64, 30_000)):
        assert machine.ratio(shape) == pytest.approx(1.0, abs=0.15)


@ENGINES
@SEEDS
def test_decoding_alone_does_not_make_it_forget_prompts(engine: Engine, seed: int) -> None:
    machine = Machine(engine, seed)
    machine.steps(100, prompts=True)
    machine.steps(2_000, prompts=False)
    added = machine.cost.predict(a_shape(400, 8, 3_000)) - machine.cost.predict(DECODE)
    true = engine.seconds(a_shape(400, 8, 3_000)) - engine.seconds(DECODE)
    assert added / true == pytest.approx(1.0, abs=0.2)


@ENGINES
def test_one_accident_hardly_moves_it(engine: Engine) -> None:
    machine = Machine(engine, 1, accidents=0.0)
    machine.steps(300, prompts=True)
    before = machine.cost.predict(MIXED)
    machine.cost.observe(MIXED, 5.0 * engine.seconds(MIXED))
    assert machine.cost.predict(MIXED) == pytest.approx(before, rel=0.07)


@ENGINES
@SEEDS
@pytest.mark.parametrize("slowness", [2.0, 0.5])
def test_a_change_that_lasts_is_followed_within_fifty_steps(engine: Engine, seed: int, slowness: float) -> None:
    machine = Machine(engine, seed)
    machine.steps(300, prompts=True)
    machine.slowness = slowness
    machine.steps(50, prompts=True)
    assert machine.ratio(DECODE) == pytest.approx(1.0, abs=0.25)
    assert machine.ratio(MIXED) == pytest.approx(1.0, abs=0.25)


@ENGINES
@SEEDS
def test_what_was_not_seen_since_the_machine_changed_is_taken_to_have_changed_with_it(
    engine: Engine, seed: int
) -> None:
    machine = Machine(engine, seed)
    machine.steps(200, prompts=True)
    machine.slowness = 2.0
    machine.steps(50, prompts=False)
    assert machine.ratio(MIXED) == pytest.approx(1.0, abs=0.25)


@ENGINES
def test_a_first_step_that_compiled_is_overcome(engine: Engine) -> None:
    machine = Machine(engine, 3, accidents=0.0)
    machine.cost.observe(PROMPT, 5.0 * engine.seconds(PROMPT))
    for _ in range(20):
        machine.step(DECODE)
        machine.step(a_shape(64, 8, 3_000))
    assert machine.ratio(MIXED) == pytest.approx(1.0, abs=0.2)


@ENGINES
def test_many_more_rows_than_ever_do_not_look_like_a_slower_machine(engine: Engine) -> None:
    machine = Machine(replace(engine, row=engine.fixed / 2), 5, accidents=0.0)
    for _ in range(100):
        machine.step(PROMPT)
        machine.step(a_shape(0, 4, 1_200))
    for _ in range(10):
        machine.step(a_shape(0, 64, 20_000))
    foreseen = machine.cost.predict(a_shape(500, 0)) - machine.cost.predict(a_shape(100, 0))
    true = engine.seconds(a_shape(500, 0)) - engine.seconds(a_shape(100, 0))
    assert foreseen == pytest.approx(true, rel=0.25)


@ENGINES
def test_prompts_that_cost_more_beside_decoding_rows_are_foreseen_as_such(engine: Engine) -> None:
    dearer = Engine(engine.fixed, 1.5 * engine.token, engine.row, engine.context, engine.pair)
    machine = Machine(engine, 7)
    for turn in range(150):
        machine.engine = engine
        machine.step(DECODE)
        if turn < 50 or turn % 3 == 0:
            machine.step(PROMPT)
        if turn >= 50:
            machine.engine = dearer
            machine.step(MIXED)
    machine.engine = dearer
    assert machine.ratio(MIXED) == pytest.approx(1.0, abs=0.1)


@ENGINES
@SEEDS
@pytest.mark.parametrize("dearer", [1.0, 1.4], ids=["as learned", "mixed steps cost more"])
def test_a_budget_holds_its_target_and_uses_it(engine: Engine, seed: int, dearer: float) -> None:
    target = 5 * engine.fixed + 8 * engine.row
    machine = Machine(engine, seed)
    machine.step(PROMPT)
    machine.step(DECODE)
    taken, start, rows = [], 0, 8
    for turn in range(2_000):
        if turn % 20 == 0:
            rows = machine.rng.randint(1, 24)
        context = rows * machine.rng.randint(200, 600)
        machine.slowness = 1.0
        if turn % 2:
            machine.step(a_shape(0, rows, context))
            continue
        tokens = machine.cost.budget(rows, context, start, target)
        machine.slowness = dearer
        seconds = machine.step(a_shape(tokens, rows, context, start))
        start = start + tokens if start < 3_000 else 0
        if turn >= 200:
            taken.append(seconds / target)
    taken.sort()
    assert taken[int(0.99 * len(taken))] <= 1.15
    assert sum(taken) / len(taken) >= 0.8


@ENGINES
def test_a_budget_is_the_most_that_fits(engine: Engine) -> None:
    """Without noise the margin is small, and one token more than the budget would pass the target."""
    cost = StepCost()
    rng = random.Random(2)
    for _ in range(400):
        rows = rng.randint(1, 64)
        shape = a_shape(rng.choice([0, rng.randint(1, 4_000)]), rows, 300 * rows, rng.randint(0, 4_000))
        cost.observe(shape, engine.seconds(shape))
    target = 5 * engine.fixed + 8 * engine.row
    for start in (0, 1_000, 30_000):
        tokens = cost.budget(8, 3_000, start, target)
        assert engine.seconds(a_shape(tokens, 8, 3_000, start)) == pytest.approx(target, rel=0.03)
        assert engine.seconds(a_shape(tokens, 8, 3_000, start)) <= target * 1.001


@ENGINES
def test_a_target_below_what_decoding_takes_leaves_no_room(engine: Engine) -> None:
    machine = Machine(engine, 1)
    machine.steps(100, prompts=True)
    assert machine.cost.budget(8, 3_000, 0, engine.fixed) == 0
    assert machine.cost.budget(8, 3_000, 0, -1.0) == 0


def test_a_further_chunk_gets_what_the_others_left() -> None:
    machine = Machine(GPU, 1)
    machine.steps(300, prompts=True)
    whole = machine.cost.budget(8, 3_000, 0, 0.01)
    rest = machine.cost.joining(a_shape(whole // 2, 8, 3_000), whole // 2, 0.01)
    assert rest == pytest.approx(whole - whole // 2, rel=0.02)
    assert machine.cost.joining(a_shape(2 * whole, 8, 3_000), 0, 0.01) == 0


def test_a_budget_grows_in_leaps_not_into_the_blue() -> None:
    """A few tokens cost less than the noise; that does not make thousands free."""
    machine = Machine(GPU, 4)
    for _ in range(50):
        machine.step(DECODE)
        machine.step(a_shape(16, 8, 3_000))
    assert 0 < machine.cost.budget(8, 3_000, 0, 1.0) <= 64
    assert 0 < machine.cost.joining(a_shape(40, 8, 3_000), 40, 1.0) <= 24


def test_before_any_prompt_a_budget_is_a_small_guess() -> None:
    machine = Machine(GPU, 4)
    machine.steps(50, prompts=False)
    assert 0 < machine.cost.budget(8, 3_000, 0, 1.0) <= 64


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_times_that_no_step_takes_are_passed_over(seconds: float) -> None:
    cost = StepCost()
    cost.observe(MIXED, 0.05)
    before = cost.predict(MIXED)
    cost.observe(MIXED, seconds)
    assert cost.predict(MIXED) == before


def test_a_step_that_computed_nothing_says_nothing() -> None:
    cost = StepCost()
    cost.observe(StepShape(0, 0, 0, 0), 1.0)
    assert cost.predict(MIXED) == 0.0


shapes = st.builds(a_shape, st.integers(0, 8_192), st.integers(0, 512), st.integers(0, 10**7), st.integers(0, 10**6))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(shapes, st.floats(1e-7, 1e6)), max_size=60), shapes, st.integers(0, 3))
def test_whatever_was_seen_more_work_never_takes_less(
    seen: list[tuple[StepShape, float]], shape: StepShape, field: int
) -> None:
    cost = StepCost()
    for one, seconds in seen:
        cost.observe(one, seconds)
    foreseen = cost.predict(shape)
    assert 0.0 <= foreseen < math.inf
    values = [shape.prefill_tokens, shape.decode_rows, shape.decode_context, shape.prefill_pairs]
    values[field] += 1_000
    assert cost.predict(StepShape(*values)) >= foreseen
    budget = cost.budget(shape.decode_rows, shape.decode_context, 1_000, 0.1)
    assert budget >= 0
    if budget:
        assert cost.predict(a_shape(budget, shape.decode_rows, shape.decode_context, 1_000)) <= 0.1001


def test_a_long_life_wears_nothing_out() -> None:
    machine = Machine(CPU, 7)
    for turn in range(30_000):
        machine.step(DECODE if turn % 1_000 else MIXED)
    assert machine.ratio(MIXED) == pytest.approx(1.0, abs=0.15)
    assert machine.ratio(DECODE) == pytest.approx(1.0, abs=0.1)


def test_observing_is_cheap() -> None:
    machine = Machine(GPU, 1)
    machine.steps(200, prompts=True)
    began = time.thread_time()
    for _ in range(1_000):
        machine.cost.observe(MIXED, GPU.seconds(MIXED))
    # About 5 µs each; the room is for a slower machine.
    assert (time.thread_time() - began) / 1_000 < 100e-6
