"""The self-scheduling echo engine: queue, blocks, reports."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st
from self_driver import SelfDriver

from text_generation_proto.values import FailureCode, Stopping, WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, Failure, NewSequence, Orders, StepResult
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.echo_self import SelfSchedulingEcho
from text_generation_shard.grammar import Matcher

PROMPT = tuple(range(7, 47))


def driver_of(*, blocks: int = 64, batch: int = 0, prefill: int = 0, **settings: object) -> SelfDriver:
    config = ShardConfig(engine="echo", echo_self_scheduling=True, **settings)  # type: ignore[arg-type]
    engine = build_engine(config)
    limits = WarmUpLimits(
        max_batch_prefill_tokens=prefill, max_batch_size=batch, max_batch_total_tokens=blocks * engine.info.block_size
    )
    assert engine.warm_up(limits) == blocks
    return SelfDriver(engine)


def echo_of(prompt: tuple[int, ...], new: int) -> list[int]:
    return [prompt[i % len(prompt)] for i in range(new)]


def steps(driver: SelfDriver) -> list[StepResult]:
    """Return the results of all steps until nothing can advance."""
    return list(iter(driver.step, None))  # type: ignore[arg-type]


def rejections(engine: Engine, orders: Orders) -> list[tuple[int, str]]:
    failures: list[Failure] = engine.apply(orders)
    assert all(failure.code is FailureCode.INVALID for failure in failures)
    return [(failure.slot, failure.message) for failure in failures]


def test_blocks_and_prefill_orders_fail_only_their_sequences() -> None:
    driver = driver_of()
    granted, chunked, neighbour = driver.admit(PROMPT), driver.admit(PROMPT), driver.admit(PROMPT)
    driver.step()
    orders = Orders(
        98,
        admit=(NewSequence(9, PROMPT, Stopping(4), blocks=(1, 2, 3)),),
        grants=((granted.slot, (5,)), (77, (6,))),
        prefill=((chunked.slot, 4), (78, 4)),
    )
    assert rejections(driver.engine, orders) == [
        (9, "the engine schedules for itself: it takes no KV blocks"),
        (granted.slot, "the engine schedules for itself: it takes no KV blocks"),
        (chunked.slot, "the engine schedules for itself: it takes no prefill orders"),
    ]
    assert driver.engine.running == 1
    driver.run()
    assert (neighbour.tokens, granted.tokens) == (echo_of(PROMPT, 8), [PROMPT[0]])


@pytest.mark.parametrize(("length", "new"), [(65, 1), (40, 26)])
def test_a_sequence_larger_than_the_pool_is_rejected(length: int, new: int) -> None:
    driver = driver_of(blocks=4)
    too_long = driver.admit(range(length), new)
    driver.step()
    assert too_long.failure is not None
    assert too_long.failure.code is FailureCode.INVALID
    assert too_long.failure.message == "prompt and new tokens exceed the engine's KV pool of 64 tokens"
    fits = driver.admit(range(40), 25)
    driver.run()
    assert fits.tokens == echo_of(fits.prompt, 25)


def test_at_most_max_batch_size_sequences_run_in_order_of_arrival() -> None:
    driver = driver_of(batch=2)
    streams = [driver.admit(PROMPT, 6) for _ in range(5)]
    finished: list[int] = []
    for result in steps(driver):
        assert len(result.slots) <= 2
        assert driver.engine.used_blocks <= 2 * 3
        finished += [slot for slot, _ in result.finished]
    assert finished == [stream.slot for stream in streams]
    assert [stream.tokens for stream in streams] == [echo_of(PROMPT, 6)] * 5


def test_prompts_are_computed_in_order_within_the_token_budget() -> None:
    driver = driver_of(prefill=32)
    first, second = driver.admit(PROMPT, 1), driver.admit(range(20), 1)
    assert [result.prefilled for result in steps(driver)] == [
        [(first.slot, 32)],
        [(first.slot, 8), (second.slot, 20)],
    ]


def test_the_newest_sequence_is_preempted_and_continues() -> None:
    driver = driver_of(blocks=8)
    old = driver.admit(PROMPT, 70, prompt_logprobs=True)
    ends_at_once = Stopping(70, frozenset(PROMPT), min_new_tokens=50)
    new = driver.admit(PROMPT, prompt_logprobs=True, stopping=ends_at_once)
    results = steps(driver)
    assert max(len(result.slots) for result in results) == 2
    assert [stream.tokens for stream in (old, new)] == [echo_of(PROMPT, 70), echo_of(PROMPT, 51)]
    # The newest was computed again with its new tokens; its prompt logprobs came once.
    computed = {stream.slot: 0 for stream in (old, new)}
    for result in results:
        for slot, tokens in result.prefilled:
            computed[slot] += tokens
    assert computed[old.slot] == len(PROMPT)
    assert computed[new.slot] > 2 * len(PROMPT)
    assert [len(stream.prompt_scores) for stream in (old, new)] == [1, 1]
    assert [slot for result in results for slot, _ in result.finished] == [old.slot, new.slot]


@pytest.mark.parametrize("how", ["release", "reset"])
def test_leaving_the_queue_cancels_the_compilation_of_the_grammar(how: str) -> None:
    driver = driver_of(batch=1)
    driver.admit(PROMPT, 30)
    building: Future[Matcher] = Future()
    queued = driver.admit(PROMPT, 4, matcher=building)
    driver.step()
    assert not building.cancelled()
    if how == "release":
        driver.release(queued)
        driver.step()
    else:
        driver.engine.reset()
    assert building.cancelled()


def test_a_sequence_for_a_taken_slot_ends_both() -> None:
    driver = driver_of()
    first = driver.admit(PROMPT)
    driver.step()
    orders = Orders(98, admit=(NewSequence(first.slot, PROMPT, Stopping(4)),))
    assert rejections(driver.engine, orders) == [(first.slot, "slot 0 is taken")]
    assert (driver.engine.running, driver.engine.used_blocks) == (0, 0)


def test_tokens_are_reported_together_and_the_last_or_a_failure_at_once() -> None:
    driver = driver_of(echo_tokens_per_report=4, echo_fail_token=999)
    long, short = driver.admit(PROMPT, 10, top_n=2), driver.admit(PROMPT, 3, prompt_logprobs=True)
    results = steps(driver)
    reported = [(list(result.slots), list(result.token_counts)) for result in results if not result.is_silent]
    assert reported == [
        ([], []),  # the prompts were computed
        ([short.slot], [3]),
        ([long.slot], [4]),
        ([long.slot], [4]),
        ([long.slot], [2]),
    ]
    assert len(results) == 10
    assert (long.tokens, short.tokens) == (echo_of(PROMPT, 10), echo_of(PROMPT, 3))
    assert [top.index for top in long.top_tokens] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert [top.token_ids[0] for top in long.top_tokens] == long.tokens
    assert len(short.prompt_scores) == 1
    stream = driver.admit([5, 6, 999], 10)
    driver.run()
    assert stream.failure is not None
    assert (stream.tokens, stream.failure.code) == ([5, 6], FailureCode.NUMERICS)


@given(
    blocks=st.integers(3, 12),
    batch=st.integers(1, 6),
    prefill=st.integers(1, 40),
    together=st.integers(1, 5),
    arrivals=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 60), st.integers(1, 6), st.integers(0, 30)), max_size=12
    ),
)
def test_tokens_do_not_depend_on_other_sequences(
    blocks: int, batch: int, prefill: int, together: int, arrivals: list[tuple[int, int, int, int]]
) -> None:
    driver = driver_of(blocks=blocks, batch=batch, prefill=prefill, echo_tokens_per_report=together)
    assert isinstance(driver.engine, SelfSchedulingEcho)
    streams = []
    for number, (length, new, pause, patience) in enumerate(arrivals):
        if -(-(length + new - 1) // 16) > blocks:
            continue
        stream = driver.admit(tuple(range(number, number + length)), new)
        streams.append(stream)
        for _ in range(pause):
            driver.step()
            assert driver.engine.used_blocks <= blocks
        if patience < 10 and driver.streams.get(stream.slot) is stream:
            driver.release(stream)
    driver.run()
    for stream in streams:
        expected = echo_of(stream.prompt, stream.stopping.max_new_tokens)
        if stream.is_over:
            assert (stream.failure, stream.tokens) == (None, expected)
        else:  # released
            assert stream.tokens == expected[: len(stream.tokens)]
    assert (driver.engine.running, driver.engine.used_blocks) == (0, 0)
