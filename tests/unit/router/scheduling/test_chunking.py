"""The token budget of a step and its distribution over prompts."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_checks import check_prompts
from scheduler_rig import Rig, a_policy

from text_generation_proto.cache_groups import CacheGroup
from text_generation_router.request import Request, RequestId
from text_generation_router.scheduling.chunking import (
    MAX_GROWTH,
    MIN_SHARED_TOKENS,
    ChunkSizer,
    PendingPrompts,
    share_budget,
    shared_tokens,
)
from text_generation_router.scheduling.keys import TOKEN_BYTES
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.sequence import ScheduledSequence

BLOCK = 16
KEY = MIN_SHARED_TOKENS * TOKEN_BYTES
MAX_TOKENS = 4096


def shared(budget: int, *lengths: int) -> dict[int, int]:
    """Share `budget` among prompts of these lengths, oldest first; return the chunk of each by its index."""
    sequences = []
    for number, length in enumerate(lengths):
        sequence = ScheduledSequence(Request(RequestId(number), (1,) * length, 1), number, 0.0, 1)
        sequence.prefill_length = length
        sequences.append(sequence)
    return {int(sequence.id): chunk for sequence, chunk in share_budget(sequences, budget)}


@pytest.mark.parametrize(
    ("budget", "lengths", "chunks"),
    [
        pytest.param(100, (30, 20, 50), {0: 30, 1: 20, 2: 50}, id="all fit"),
        pytest.param(64, (1000, 200, 10, 20), {0: 32, 2: 10, 3: 20, 1: 2}, id="shortest first, half for the oldest"),
        pytest.param(64, (1000, 10), {1: 10, 0: 54}, id="the rest goes to the oldest"),
        pytest.param(50, (40, 40, 40), {0: 40, 1: 10}, id="ties by age"),
        pytest.param(1, (5, 1), {0: 1}, id="budget of one"),
    ],
)
def test_the_budget_is_shared(budget: int, lengths: tuple[int, ...], chunks: dict[int, int]) -> None:
    assert shared(budget, *lengths) == chunks


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=12), budget=st.integers(1, 400))
def test_the_budget_is_used_but_never_exceeded_and_the_oldest_gets_half(lengths: list[int], budget: int) -> None:
    chunks = shared(budget, *lengths)
    assert sum(chunks.values()) == min(budget, sum(lengths))
    assert all(0 < chunk <= lengths[number] for number, chunk in chunks.items())
    assert chunks[0] >= min(lengths[0], budget / 2)


def make_sizer(target_s: float | None) -> ChunkSizer:
    return ChunkSizer(Policy(MAX_TOKENS, 64, target_itl_s=target_s), BLOCK)


def run_steps(sizer: ChunkSizer, steps: int, seconds_of: Callable[[int], float], decoding: int = 10) -> list[float]:
    """Run steps that compute the full budget and take `seconds_of(prompt tokens)`; return their durations."""
    durations = []
    for _ in range(steps):
        tokens = sizer.budget(decoding)
        durations.append(seconds_of(tokens))
        sizer.update(tokens, decoding, durations[-1])
    return durations


def test_without_a_target_or_without_decoding_the_budget_is_the_limit() -> None:
    assert make_sizer(None).budget(decoding=10) == MAX_TOKENS
    assert make_sizer(0.001).budget(decoding=0) == MAX_TOKENS


@pytest.mark.parametrize(
    ("decoding", "prompts", "tokens"), [(0, 1, 512), (1, 1, 64), (1, 5, 320), (1, 47, 512), (48, 1, 64), (31, 17, 64)]
)
def test_prompts_that_wait_take_a_suggested_chunk_by_their_share(decoding: int, prompts: int, tokens: int) -> None:
    sizer = ChunkSizer(Policy(512, 64, chunk_tokens=64), BLOCK)
    assert sizer.budget(decoding, prompts) == tokens


def test_before_a_measurement_the_budget_is_one_block() -> None:
    assert make_sizer(0.05).budget(decoding=10) == BLOCK


def test_the_first_chunks_grow_by_a_limited_factor() -> None:
    sizer = make_sizer(10.0)
    sizer.update(0, 10, 0.01)
    sizer.update(BLOCK, 10, 0.01)
    assert sizer.budget(10) == MAX_GROWTH * BLOCK


@pytest.mark.parametrize("target_s", [0.02, 0.05, 0.1])
@pytest.mark.parametrize("token_s", [1e-5, 1e-4, 1e-3])
def test_steps_approach_the_target_from_below(target_s: float, token_s: float) -> None:
    sizer = make_sizer(target_s)
    sizer.update(0, 10, 0.01)
    durations = run_steps(sizer, 30, lambda tokens: 0.01 + token_s * tokens)
    limit_s = max(target_s, 0.01 + token_s * BLOCK)
    assert max(durations) <= limit_s
    assert durations[-1] >= min(0.8 * target_s, 0.01 + token_s * MAX_TOKENS)


def test_a_target_below_the_decode_time_still_lets_prompts_advance() -> None:
    sizer = make_sizer(0.001)
    sizer.update(0, 10, 0.01)
    durations = run_steps(sizer, 30, lambda tokens: 0.01 + 1e-4 * tokens)
    assert durations[-1] == pytest.approx(0.015, rel=0.1)


def test_a_cost_that_grows_along_a_prompt_is_followed() -> None:
    sizer = make_sizer(0.04)
    sizer.update(0, 10, 0.004)
    position = 0
    durations = []
    while position < 65_536:
        tokens = sizer.budget(10)
        durations.append(0.004 + 1.3e-5 * tokens + 1e-9 * tokens * (position + tokens / 2))
        sizer.update(tokens, 10, durations[-1])
        position += tokens
    durations.sort()
    assert durations[len(durations) * 95 // 100] <= 0.041
    assert sum(durations) < 2 * (65_536 * 1.3e-5 + 1e-9 * 65_536**2 / 2)


def test_a_slower_machine_is_followed_at_once_and_a_faster_one_soon() -> None:
    sizer = make_sizer(0.05)
    sizer.update(0, 10, 0.01)
    run_steps(sizer, 20, lambda tokens: 0.01 + 1e-4 * tokens)
    slower = run_steps(sizer, 20, lambda tokens: 0.01 + 2e-4 * tokens)
    assert all(seconds <= 0.055 for seconds in slower[1:])
    faster = run_steps(sizer, 30, lambda tokens: 0.01 + 5e-5 * tokens)
    assert faster[-1] == pytest.approx(0.045, rel=0.1)


def test_one_slow_step_is_forgotten_soon() -> None:
    sizer = make_sizer(0.05)
    sizer.update(0, 10, 0.01)
    run_steps(sizer, 20, lambda tokens: 0.01 + 1e-4 * tokens)
    before = sizer.budget(10)
    sizer.update(before, 10, 1.0)
    assert sizer.budget(10) >= before // 2 - 1
    run_steps(sizer, 10, lambda tokens: 0.01 + 1e-4 * tokens)
    assert sizer.budget(10) >= 0.9 * before


def test_without_steps_that_only_decode_the_decode_time_follows() -> None:
    sizer = make_sizer(0.1)
    sizer.update(0, 10, 0.01)
    durations = run_steps(sizer, 300, lambda tokens: 0.06 + 1e-4 * tokens)
    assert max(durations[100:]) <= 0.1


@given(seed=st.integers(0, 1 << 20))
def test_with_noise_the_target_holds_for_nearly_all_steps(seed: int) -> None:
    noise, sizer = Random(seed), make_sizer(0.05)
    sizer.update(0, 10, 0.01)
    durations = run_steps(sizer, 400, lambda tokens: (0.01 + 1e-4 * tokens) * noise.uniform(0.95, 1.05))
    assert sum(seconds > 0.05 for seconds in durations) <= 8
    assert sum(durations) / len(durations) >= 0.035


def pending_prompts(prompts: list[tuple[int, ...]]) -> tuple[PendingPrompts, list[ScheduledSequence]]:
    pending, sequences = PendingPrompts(BLOCK, 64), []
    for number, prompt in enumerate(prompts):
        sequences.append(ScheduledSequence(Request(RequestId(number), prompt, 1), number, 0.0, 1))
        sequences[-1].prefill_length = len(prompt)
        pending.add(sequences[-1])
    return pending, sequences


@given(st.randoms(use_true_random=False), st.integers(1, 30))
def test_the_longest_prefix_shared_with_a_pending_prompt_is_found(random: Random, count: int) -> None:
    def prompt() -> tuple[int, ...]:
        parts = random.choices(range(3), k=random.randrange(4))
        return tuple(part for part in parts for _ in range(40)) + (random.randrange(300),) * random.randrange(1, 30)

    pending, sequences = pending_prompts([prompt() for _ in range(count)])
    for left in random.sample(sequences, count // 3):
        pending.remove(left)
    asked = ScheduledSequence(Request(RequestId(count), prompt(), 1), count, 0.0, 1)
    likely = [each for each in sequences if each in pending and each.prompt_key[:KEY] == asked.prompt_key[:KEY]]
    likely = likely if asked.length >= MIN_SHARED_TOKENS else []
    shared = [shared_tokens(asked.prompt_key, each.prompt_key, BLOCK) for each in likely]
    tokens, owner = pending.longest_shared(asked)
    assert tokens == min(max(shared, default=0), (asked.length - 1) // BLOCK * BLOCK)
    assert owner is None if not shared else shared[likely.index(owner)] == max(shared)  # type: ignore[arg-type]
    check_prompts(pending, {each for each in sequences if each in pending})


def test_the_time_to_find_a_shared_prefix_does_not_grow_with_the_pending_prompts() -> None:
    pending, _ = pending_prompts([(7,) * 1000 + tuple(range(number, number + 1000)) for number in range(1024)])
    asked = ScheduledSequence(Request(RequestId(-1), (7,) * 1000 + (5,) * 1000, 1), 0, 0.0, 1)
    rounds = []
    for _ in range(10):
        started = time.thread_time()
        assert pending.longest_shared(asked)[0] == 992
        rounds.append(time.thread_time() - started)
    assert min(rounds) < 500e-6  # about 0.02 ms; a pass over all prompts takes 10 ms


def test_a_long_prompt_does_not_crawl_while_the_blocks_of_a_window_are_scarce() -> None:
    budget, tokens = 256, 4096
    rig = Rig(
        a_policy(max_batch_prefill_tokens=budget, max_batch_size=32),
        blocks=4000,
        slots=32,
        windows=(CacheGroup(60, window=64),),
    )
    long, turns = -1, 0
    while long not in rig.tokens:
        while len(rig.scheduler.queue) < 8:
            rig.submit(20, new=100)
        if rig.now > 0.8 and long < 0:
            long = rig.submit(tokens, new=5)
        rig.turn()
        turns += long in rig.placed()
    assert turns <= 4 * tokens / budget, "one block at a time would take 256 steps"
