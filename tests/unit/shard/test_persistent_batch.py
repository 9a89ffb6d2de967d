"""The persistent batch gives the same results as rows of their own."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from engine_infos import GPU_ENGINE

from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.values import FailureCode, LogprobOptions, Sampling, Stopping
from text_generation_shard.engine import NewSequence, Orders, StepResult
from text_generation_shard.step.sequence import SamplerOutput, Sequence, StepRows
from text_generation_shard.step.table import SequenceTable

BLOCK_SIZE = GPU_ENGINE.block_size
BLOCKS = 4096
INFO = GPU_ENGINE
FAILURE = (FailureCode.NUMERICS, "the logits leave no token to choose")


@dataclass
class Host:
    """A table and its steps. Each step is recorded after the next has begun, as by an engine that runs ahead."""

    table: SequenceTable
    pending: deque[StepRows] = field(default_factory=lambda: deque([StepRows(None, [])]))

    def step(self, orders: Orders) -> tuple[set[tuple[int, int]], StepResult]:
        """Return (slot, first position) of each row of the step, and the result of the step before."""
        self.table.apply(orders)
        rows = self.table.rows()
        self.table.begin(rows)
        self.pending.append(rows)
        before = self.pending.popleft()
        positions = {(row.sequence.slot, row.start) for row in rows.others}
        if rows.persistent is not None:
            positions |= set(zip(rows.persistent.slots.tolist(), rows.persistent.starts.tolist(), strict=True))
        return positions, self.table.advance(before, sample(before))


def sample(rows: StepRows) -> SamplerOutput:
    """Return tokens that depend on sequence and position only; a few rows fail."""
    output = SamplerOutput([], [])
    ends: list[tuple[Sequence, int]] = []
    if rows.persistent is not None:
        ends += zip(rows.persistent.sequences, rows.persistent.starts.tolist(), strict=True)
    ends += [(row.sequence, row.start + row.length - 1) for row in rows.sampling]
    for index, (sequence, position) in enumerate(ends):
        token_id = (sequence.tokens[0] * 31 + position * 7) % 200
        output.token_ids.append(token_id)
        output.logprobs.append(-token_id / 7)
        if token_id == 77:
            output.failures[index] = FAILURE
    return output


def by_slot(result: StepResult) -> dict[str, object]:
    """Return the content of a result, independent of the order of slots."""
    return {
        "tokens": sorted(zip(result.slots, result.token_ids, result.logprobs, strict=True)),
        "finished": sorted(result.finished),
        "failed": sorted((failure.slot, failure.message) for failure in result.failed),
        "prefilled": sorted(result.prefilled),
    }


def random_orders(draw: random.Random, number: int, held: dict[int, Sequence], free: list[int]) -> Orders:
    """Return orders that a router may send: releases, new sequences, blocks, whole prompts."""
    release = tuple(slot for slot in held if draw.random() < 0.01)
    admit: list[NewSequence] = []
    for slot in set(range(INFO.max_slots)) - held.keys() if draw.random() < 0.4 else ():
        if len(admit) == 6:
            break
        prompt = tuple(draw.randrange(1000) for _ in range(draw.randrange(1, 20)))
        stopping = Stopping(
            draw.randrange(1, 60), frozenset(draw.sample(range(200), 3)), frozenset({5}), draw.randrange(4)
        )
        sampling = Sampling(greedy=False, temperature=0.5) if draw.random() < 0.2 else Sampling()
        blocks = tuple(free.pop() for _ in range(len(prompt) // BLOCK_SIZE + 1))
        admit.append(NewSequence(slot, prompt, stopping, sampling, blocks=blocks))
    allocations = [
        (slot, tuple(free.pop() for _ in range(draw.randrange(1, 4))))
        for slot in held
        if slot not in release and draw.random() < 0.3
    ]
    prefill = [(new.slot, len(new.prompt)) for new in admit]
    return Orders(
        number=number, release=release, placements=tuple(admit), allocations=tuple(allocations), prefill=tuple(prefill)
    )


@pytest.mark.parametrize("seed", range(4))
def test_results_do_not_depend_on_the_persistent_batch(seed: int) -> None:
    draw = random.Random(seed)
    plain, persistent = (
        Host(SequenceTable(INFO, (CacheGroup(BLOCKS * 8),), runs_ahead=runs_ahead)) for runs_ahead in (False, True)
    )
    free = list(range(BLOCKS * 8))
    blocks: dict[Sequence, list[int]] = {}
    largest = finished = failed = 0
    for number in range(400):
        orders = random_orders(draw, number, dict(plain.table.sequences), free)
        (expected_positions, expected), (positions, result) = plain.step(orders), persistent.step(orders)
        assert positions == expected_positions
        assert by_slot(result) == by_slot(expected)
        assert persistent.table.used_blocks == plain.table.used_blocks
        assert len(persistent.table) == len(plain.table)
        if (rows := persistent.pending[0].persistent) is not None:
            blocks |= {sequence: list(sequence.blocks) for sequence in rows.changed}
            assert all(blocks.get(sequence) == sequence.blocks for sequence in rows.sequences)
        largest = max(largest, persistent.pending[0].num_persistent)
        finished += len(result.finished)
        failed += len(result.failed)
    assert largest > 20
    assert finished > 100
    assert failed > 3


def test_only_greedy_sequences_without_top_tokens_are_persistent_and_not_stored() -> None:
    def new(slot: int, sampling: Sampling = Sampling(), top_n: int = 0) -> NewSequence:
        blocks = tuple(range(slot * 10, slot * 10 + 10))
        logprobs = LogprobOptions(top_n)
        return NewSequence(slot, (slot + 1, 2, 3), Stopping(30), sampling, blocks=blocks, logprobs=logprobs)

    host = Host(SequenceTable(INFO, (CacheGroup(BLOCKS),), runs_ahead=True))
    admit = (new(0), new(1, Sampling(temperature=0.5, greedy=False)), new(2, top_n=1))
    host.step(Orders(1, placements=admit, prefill=((0, 3), (1, 3), (2, 3))))
    for number in range(2, 9):
        host.step(Orders(number))
    rows = host.pending[0]
    assert rows.persistent is not None
    assert rows.persistent.slots.tolist() == [0]
    assert [row.sequence.slot for row in rows.others] == [1, 2]
    sequence = host.table.sequences[0]
    # The prompt, its first new token, and the token of the step in progress when that was recorded.
    assert len(sequence.tokens) == 5
    assert sequence.computed == 4
