"""Sessions of agents on a replica whose model has states, played in the simulator: hits by policy of checkpoints and by memory.

    python -m text_generation_bench.checkpoints [--sessions 24] [--seconds 60]

The memory is enough for all sessions, then for a third of them. The states are those that the formula of the warm-up gives, and fewer;
"attention": a model without states, whose hits are those of the KV blocks alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from random import Random
from unittest.mock import patch

from text_generation_bench.load.agents import SYSTEM_TOKENS, draw_session
from text_generation_bench.simulator.config import POLICIES, LatencyTargets, SimConfig
from text_generation_bench.simulator.cost_model import MACHINES, CostModel
from text_generation_bench.simulator.simulator import Simulator
from text_generation_bench.simulator.traces import AgentSource, Arrival, TokenPool, system_prompts
from text_generation_router.scheduling import kv_cache
from text_generation_router.scheduling.checkpoints import StateCheckpoint, checkpoints

STATE_BYTES = 60 << 20
"""Bytes of a state of Qwen3-Next-80B-A3B."""
SEED = 7
STATES, USUAL_TOKENS = 4, 16384
"""The formula of the warm-up: states for each so many tokens."""

Policy = Callable[[int, Sequence[int], int, int, int], list[StateCheckpoint]]


def fixed(
    length: int, turn_ends: Sequence[int], branch: int, cached: int, block_size: int, every: int = 512
) -> list[StateCheckpoint]:
    """Return checkpoints at fixed distances, as other servers leave them."""
    del turn_ends, branch, block_size
    return [StateCheckpoint(position) for position in range((length - 1) // every * every, cached, -every)]


def sessions(count_: int, seconds_between: float) -> tuple[Iterator[Arrival], int]:
    """Return the first requests of sessions, and the tokens that the largest context of each takes, in all."""
    random, pool = Random(SEED), POOL
    systems = system_prompts(pool, random, 4, SYSTEM_TOKENS)
    drawn = [draw_session(random) for _ in range(count_)]
    tokens = sum(max(context + turn.new_tokens for turn, context in each.contexts()) for each in drawn)
    times = (number * seconds_between for number in count())
    return AgentSource(pool, random, systems).sessions(times, iter(drawn)), tokens


def play(model: CostModel, policy: Policy, trace: Iterator[Arrival]) -> tuple[float, float]:
    """Return the share of prompt tokens found in the cache, and the mean time of a decision in microseconds."""
    config = SimConfig(model, POLICIES["ours"](model, None).policy, 1, LatencyTargets(10.0, 1.0), POOL.ids)
    with patch.object(kv_cache, "checkpoints", policy):
        simulator = Simulator(config)
        simulator.run(trace)
    decide = simulator.timings.decide
    return simulator.scheduler.stats().hit_rate, 1e6 * decide.seconds / decide.count


POOL = TokenPool(SEED)


def main() -> None:
    """Play all policies and sizes; print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=60.0, help="time between the starts of sessions")
    arguments = parser.parse_args()
    tokens = sessions(arguments.sessions, arguments.seconds)[1]
    third = tokens // 3
    formula = STATES * third // USUAL_TOKENS
    print(f"{arguments.sessions} sessions of {tokens // arguments.sessions:,} tokens")
    print("   policy   KV tokens  states     GiB    hits  of unlimited  us a decision  seconds")
    plays: list[tuple[str, Policy, int, int]] = [("ours", checkpoints, 3 * tokens, 3 * tokens // 512)]
    plays += [("attention", checkpoints, third, 0)]
    plays += [("ours", checkpoints, third, states) for states in (formula, formula // 4, formula // 8)]
    plays += [("fixed 512", fixed, third, states) for states in (third // 512, third // 1024, formula)]
    unlimited = 0.0
    for name, policy, size, states in plays:
        began = time.perf_counter()
        model = replace(MACHINES["h200-8b"], block_size=16, kv_tokens=size, states=states)
        hits, decision = play(model, policy, sessions(arguments.sessions, arguments.seconds)[0])
        unlimited = unlimited or hits
        memory, took = states * STATE_BYTES / 2**30, time.perf_counter() - began
        numbers = f"{size:>11,} {states:>7,} {memory:>7.1f} {hits:>7.4f} {hits / unlimited:>13.4f} {decision:>14.0f} {took:>8.0f}"
        print(f"{name:>9} {numbers}", flush=True)


if __name__ == "__main__":
    main()
