"""Traces: ordered by time, reproducible by seed, with the promised prompts."""

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
    chats,
    system_prompts,
)

SIZES = RequestSizes((5, 50), 20, 60)


def scenario_trace(scenario: str, machine: str, seed: int) -> list[Arrival]:
    seconds = 1200.0 if scenario in ("agents", "targets") else 4.0
    source = ScenarioInput(MACHINES[machine], WORKLOAD_SIZES[machine], 1, seconds, seed, TokenPool(seed))
    return list(islice(SCENARIOS[scenario].build(source).trace, 200))


def values(trace: list[Arrival]) -> list[tuple[object, ...]]:
    return [(new.at, new.prompt, new.new_tokens, new.max_new_tokens, new.answer_at, new.tenant) for new in trace]


@pytest.mark.parametrize("machine", sorted(MACHINES))
@pytest.mark.parametrize("scenario", sorted(set(SCENARIOS) - {"scale"}))
def test_scenarios_are_ordered_reproducible_and_within_limits(scenario: str, machine: str) -> None:
    trace = scenario_trace(scenario, machine, 5)
    times = [new.at for new in trace]
    assert times == sorted(times)
    assert values(trace) == values(scenario_trace(scenario, machine, 5))
    assert values(trace) != values(scenario_trace(scenario, machine, 6))
    room = MACHINES[machine].kv_tokens * SCENARIOS[scenario].kv_share
    for new in trace:
        assert 1 <= new.new_tokens <= new.max_new_tokens
        assert len(new.prompt) + new.max_new_tokens <= room


def test_prompt_of_a_turn_contains_the_chat_so_far() -> None:
    pool, random = TokenPool(1), Random(1)
    systems = system_prompts(pool, random, 1, 10)
    profile = ChatProfile(SIZES, turns_mean=5.0, think_mean_s=3.0, longest=400)
    longest = 0
    for first in chats(pool, random, iter(float(at) for at in range(50)), profile, systems):
        assert first.prompt[:10] == systems[0]
        turn, turns = first, 1
        while turn.follow_up is not None:
            text = turn.prompt + pool.ids[turn.answer_at : turn.answer_at + turn.new_tokens]
            before = turn.at
            following = turn.follow_up(turn.at + 1.0)
            if following is None:
                break
            assert following.prompt[: len(text)] == text
            assert len(text) < len(following.prompt) <= 400
            assert following.at > before + 1.0
            turn, turns = following, turns + 1
        longest = max(longest, turns)
    assert longest > 5
