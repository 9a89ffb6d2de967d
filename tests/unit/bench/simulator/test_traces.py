"""Traces: in order of time, the same for the same seed, and what they promise of prompts."""

from __future__ import annotations

from itertools import islice
from random import Random

import pytest

from text_generation_bench.simulator.cost_model import MACHINES
from text_generation_bench.simulator.scenarios import SCENARIOS, WORKLOAD_SIZES, ScenarioInput
from text_generation_bench.simulator.traces import (
    Arrival,
    ChatProfile,
    RequestSizes,
    TokenPool,
    ZipfDistribution,
    chats,
    phased_times,
    poisson_times,
    shared_prefixes,
    system_prompts,
    unrelated_requests,
)

SIZES = RequestSizes((5, 50), 20, 60)


def made(scenario: str, machine: str, seed: int) -> list[Arrival]:
    setting = ScenarioInput(MACHINES[machine], WORKLOAD_SIZES[machine], 1, 4.0, seed, TokenPool(seed))
    return list(islice(SCENARIOS[scenario].build(setting).trace, 200))


def plain(arrivals: list[Arrival]) -> list[tuple[object, ...]]:
    return [(one.at, one.prompt, one.new_tokens, one.max_new_tokens, one.answer_at, one.tenant) for one in arrivals]


@pytest.mark.parametrize("machine", sorted(MACHINES))
@pytest.mark.parametrize("scenario", sorted(set(SCENARIOS) - {"scale"}))
def test_every_scenario_is_in_order_within_its_limits_and_repeats_itself(scenario: str, machine: str) -> None:
    arrivals = made(scenario, machine, 5)
    times = [one.at for one in arrivals]
    assert times == sorted(times)
    assert plain(arrivals) == plain(made(scenario, machine, 5))
    room = MACHINES[machine].kv_tokens * SCENARIOS[scenario].kv_share
    for one in arrivals:
        assert 1 <= one.new_tokens <= one.max_new_tokens
        assert len(one.prompt) + one.max_new_tokens <= room


def test_another_seed_is_another_trace() -> None:
    assert plain(made("poisson", "h200-8b", 1)) != plain(made("poisson", "h200-8b", 2))


def test_poisson_times_come_at_their_rate() -> None:
    times = list(poisson_times(Random(1), 50.0, 10.0, 110.0))
    assert 4700 < len(times) < 5300
    assert min(times) >= 10.0
    assert max(times) < 110.0


def test_phases_follow_each_other() -> None:
    times = list(phased_times(Random(1), [(10.0, 100.0), (10.0, 0.0), (10.0, 10.0)]))
    assert sum(time < 10 for time in times) > 800
    assert not [time for time in times if 10 <= time < 20]
    assert 50 < sum(time >= 20 for time in times) < 160


def test_unrelated_prompts_share_no_beginning() -> None:
    pool, random = TokenPool(1), Random(1)
    firsts = [one.prompt[0] for one in unrelated_requests(pool, random, iter(range(2000)), SIZES)]
    assert len(set(firsts)) == 2000


def test_shared_prefixes_are_shared_by_zipf() -> None:
    pool, random = TokenPool(1), Random(1)
    systems = system_prompts(pool, random, 4, 100)
    counts = [0] * 4
    for one in shared_prefixes(pool, random, iter(range(4000)), SIZES, systems):
        counts[systems.index(one.prompt[:100])] += 1
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == pytest.approx(4000 / (1 + 1 / 2 + 1 / 3 + 1 / 4), rel=0.1)


def test_zipf_draws_every_rank() -> None:
    zipf, random = ZipfDistribution(3), Random(1)
    assert {zipf.draw(random) for _ in range(200)} == {0, 1, 2}


def test_each_turn_of_a_chat_holds_the_turns_and_answers_before_it() -> None:
    pool, random = TokenPool(1), Random(1)
    systems = system_prompts(pool, random, 1, 10)
    profile = ChatProfile(SIZES, turns_mean=5.0, think_mean_s=3.0, longest=100_000)
    longest = 0
    for first in chats(pool, random, iter(float(at) for at in range(50)), profile, systems):
        assert first.prompt[:10] == systems[0]
        said, turn, turns = first.prompt, first, 1
        while turn.follow_up is not None:
            answer = pool.ids[turn.answer_at : turn.answer_at + turn.new_tokens]
            before = turn.at
            following = turn.follow_up(turn.at + 1.0)
            if following is None:
                break
            said += answer
            assert following.prompt[: len(said)] == said
            assert len(following.prompt) > len(said)
            assert following.at > before + 1.0
            said, turn, turns = following.prompt, following, turns + 1
        longest = max(longest, turns)
    assert longest > 5


def test_a_chat_ends_before_its_prompt_is_too_long() -> None:
    pool, random = TokenPool(1), Random(1)
    profile = ChatProfile(SIZES, turns_mean=50.0, think_mean_s=3.0, longest=120)
    for first in chats(pool, random, iter([0.0] * 20), profile):
        turn: Arrival | None = first
        while turn is not None and turn.follow_up is not None:
            assert len(turn.prompt) <= 120
            turn = turn.follow_up(turn.at)
