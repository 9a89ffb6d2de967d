"""The self-scheduling echo engine: queue, blocks, reports."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from self_driver import SelfDriver
from self_scheduling_echo import SelfSchedulingEcho

from text_generation_proto.values import FailureCode, Stopping, WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, Failure, NewSequence, Orders

PROMPT = tuple(range(7, 47))


def driver_of(*, blocks: int = 64, batch: int = 0, prefill: int = 0, **options: int) -> SelfDriver:
    engine = SelfSchedulingEcho.build(ShardConfig(engine="echo"), **options)
    limits = WarmUpLimits(
        max_batch_prefill_tokens=prefill, max_batch_size=batch, max_batch_total_tokens=blocks * engine.info.block_size
    )
    assert engine.warm_up(limits) == blocks
    return SelfDriver(engine)


def echo_of(prompt: tuple[int, ...], new: int) -> list[int]:
    return [prompt[i % len(prompt)] for i in range(new)]


def rejections(engine: Engine, orders: Orders) -> list[tuple[int, str]]:
    failures: list[Failure] = engine.apply(orders)
    assert all(failure.code is FailureCode.INVALID for failure in failures)
    return [(failure.slot, failure.message) for failure in failures]


def test_blocks_and_prefill_orders_fail_only_their_sequences() -> None:
    driver = driver_of()
    allocated, chunked, neighbour = driver.admit(PROMPT), driver.admit(PROMPT), driver.admit(PROMPT)
    driver.step()
    orders = Orders(
        98,
        placements=(NewSequence(9, PROMPT, Stopping(4), blocks=(1, 2, 3)),),
        allocations=((allocated.slot, (5,)), (77, (6,))),
        prefill=((chunked.slot, 4), (78, 4)),
    )
    assert rejections(driver.engine, orders) == [
        (9, "the engine schedules for itself: it takes no KV blocks"),
        (allocated.slot, "the engine schedules for itself: it takes no KV blocks"),
        (chunked.slot, "the engine schedules for itself: it takes no prefill orders"),
    ]
    assert driver.engine.running == 1
    driver.run()
    assert (neighbour.tokens, allocated.tokens) == (echo_of(PROMPT, 8), [PROMPT[0]])


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
    driver = driver_of(blocks=blocks, batch=batch, prefill=prefill, tokens_per_report=together)
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
