"""Sequences in steady decoding advance as any others do: only the host does less for them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from text_generation_proto.values import FailureCode, FinishReason, LogprobOptions, Sampling, Stopping
from text_generation_shard.engine import EngineInfo, NewSequence, Orders, Scheduling, StepResult
from text_generation_shard.step.chosen import Chosen
from text_generation_shard.step.sequence import Sequence
from text_generation_shard.step.steady import SteadyTable, StepRows
from text_generation_shard.step.table import SequenceTable

BLOCK_SIZE = 4
BLOCKS = 4096
INFO = EngineInfo(
    engine="torch",
    model_id="",
    model_type="llama",
    scheduling=Scheduling.STEP,
    eos_token_ids=(2,),
    suggested_prefill_tokens=2048,
    max_top_n_tokens=5,
    dtype="float32",
    device="cuda",
    vocab_size=1000,
    block_size=BLOCK_SIZE,
    max_slots=64,
    max_sequence_length=4096,
)
FAILURE = (FailureCode.NUMERICS, "the logits leave no token to choose")


@dataclass
class Host:
    """A table, and its steps: each is recorded when the one after it has begun, as where the device is left to itself."""

    table: SequenceTable
    pending: deque[StepRows] = field(default_factory=lambda: deque([StepRows(None, [])]))

    def step(self, orders: Orders) -> tuple[set[tuple[int, int]], StepResult]:
        """Where the sequences are that the step computes, and what the step before it brought."""
        self.table.apply(orders)
        rows = self.table.rows()
        self.table.begin(rows)
        self.pending.append(rows)
        before = self.pending.popleft()
        return set(_places(rows)), self.table.advance(before, _chosen(before))


def _places(rows: StepRows) -> Iterator[tuple[int, int]]:
    """The slot and the first position of each."""
    if rows.steady is not None:
        yield from zip(rows.steady.slots.tolist(), rows.steady.starts.tolist(), strict=True)
    yield from ((row.sequence.slot, row.start) for row in rows.others)


def _chosen(rows: StepRows) -> Chosen:
    """A token that hangs on the sequence and the position; now and then there is none."""
    chosen = Chosen([], [])
    ends = [] if rows.steady is None else list(zip(rows.steady.sequences, rows.steady.starts.tolist(), strict=True))
    ends += [(row.sequence, row.start + row.length - 1) for row in rows.sampling]
    for place, (sequence, position) in enumerate(ends):
        token_id = (sequence.tokens[0] * 31 + position * 7) % 200
        chosen.token_ids.append(token_id)
        chosen.logprobs.append(-token_id / 7)
        if token_id == 77:
            chosen.failures[place] = FAILURE
    return chosen


def told(result: StepResult) -> dict[str, object]:
    """What a client is told, whatever the order of the slots in it."""
    return {
        "tokens": sorted(zip(result.slots, result.token_ids, result.logprobs, strict=True)),
        "finished": sorted(result.finished),
        "failed": sorted((failure.slot, failure.message) for failure in result.failed),
        "prefilled": sorted(result.prefilled),
    }


def orders_of(draw: random.Random, number: int, held: dict[int, Sequence], free: list[int]) -> Orders:
    """What a router may order at a boundary: it lets go, admits, grants and prefills."""
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
    grants = [
        (slot, tuple(free.pop() for _ in range(draw.randrange(1, 4))))
        for slot in held
        if slot not in release and draw.random() < 0.3
    ]
    prefill = [(admission.slot, len(admission.prompt)) for admission in admit]
    return Orders(number=number, release=release, admit=tuple(admit), grants=tuple(grants), prefill=tuple(prefill))


@pytest.mark.parametrize("seed", range(4))
def test_a_client_is_told_the_same(seed: int) -> None:
    draw = random.Random(seed)
    plain, steady = (Host(SequenceTable(INFO, num_blocks=BLOCKS * 8, steady=table)) for table in (None, SteadyTable()))
    free = list(range(BLOCKS * 8))
    most_steady = finished = failed = 0
    for number in range(400):
        orders = orders_of(draw, number, dict(plain.table._sequences), free)
        (expected_places, expected), (places, result) = plain.step(orders), steady.step(orders)
        assert places == expected_places
        assert told(result) == told(expected)
        assert steady.table.used_blocks == plain.table.used_blocks
        assert len(steady.table) == len(plain.table)
        most_steady = max(most_steady, steady.pending[0].num_steady)
        finished += len(result.finished)
        failed += len(result.failed)
    assert most_steady > 20
    assert finished > 100
    assert failed > 3


def host_with(*admissions: NewSequence) -> Host:
    """A host whose sequences have computed their prompts and whose first tokens are recorded."""
    host = Host(SequenceTable(INFO, num_blocks=BLOCKS, steady=SteadyTable()))
    host.step(Orders(1, admit=admissions, prefill=tuple((one.slot, len(one.prompt)) for one in admissions)))
    host.step(Orders(2))
    return host


def admission(slot: int, sampling: Sampling = Sampling(), new: int = 9, top_n: int = 0) -> NewSequence:
    blocks = tuple(range(slot * 10, slot * 10 + 10))
    return NewSequence(slot, (slot + 1, 2, 3), Stopping(new), sampling, blocks=blocks, logprobs=LogprobOptions(top_n))


def test_steady_is_of_whom_nothing_but_the_most_probable_token_is_asked() -> None:
    host = host_with(admission(0), admission(1, Sampling(temperature=0.5, greedy=False)), admission(2, top_n=1))
    host.step(Orders(3))
    rows = host.pending[0]
    assert rows.steady is not None
    assert rows.steady.slots.tolist() == [0]
    assert [row.sequence.slot for row in rows.others] == [1, 2]


def test_tokens_of_a_steady_sequence_are_not_kept() -> None:
    host = host_with(admission(0, new=30))
    for number in range(3, 9):
        host.step(Orders(number))
    sequence = host.table._sequences[0]
    # The prompt, the token chosen with it, and the one of the step that was under way when that was recorded.
    assert len(sequence.tokens) == 5
    assert sequence.computed == 4


def test_the_longest_answer_is_not_exceeded() -> None:
    host = host_with(admission(0, new=4))
    results = [host.step(Orders(number))[1] for number in range(3, 8)]
    # The first of the four came with the prompt.
    assert [result.slots for result in results] == [[0], [0], [0], [], []]
    assert [result.finished for result in results] == [[], [], [(0, FinishReason.LENGTH)], [], []]
    assert host.table.used_blocks == 0


def test_a_sequence_without_room_waits_for_its_grant() -> None:
    short = NewSequence(0, (1, 2, 3), Stopping(20), blocks=(7, 8))
    host = host_with(short)
    for number in range(3, 8):
        host.step(Orders(number))
    assert host.step(Orders(8))[0] == set()
    assert host.step(Orders(9, grants=((0, (9,)),)))[0] == {(0, 8)}
    assert host.pending[0].steady is not None
    assert [sequence.blocks for sequence in host.pending[0].steady.changed] == [[7, 8, 9]]
