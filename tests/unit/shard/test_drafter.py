"""The drafts of a step: where they are looked for, and rates that are set for measurements."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from text_generation_proto.values import MTP, Stopping
from text_generation_shard.engine import Drafting, NewSequence, StepResult
from text_generation_shard.step.drafts import drafter as drafter_module
from text_generation_shard.step.drafts.drafter import MANY, PAUSE, QUIET_STEPS, RETRY_STEPS, Drafter, drafting_of
from text_generation_shard.step.drafts.synthetic import probability_of
from text_generation_shard.step.sequence import Draft, SamplerOutput, Sequence, StepRow, StepRows, take_tokens

VOCABULARY = 1000


def sequences(count: int, repeats: int = 1) -> list[Sequence]:
    made = [
        Sequence.of(NewSequence(slot, tuple(range(1 + slot, 30 + slot)) * repeats, Stopping(10_000)))
        for slot in range(count)
    ]
    for sequence in made:
        sequence.end = 5000
    return made


def tokens_of(drafts: dict[int, Draft]) -> dict[int, tuple[int, ...]]:
    return {slot: draft.tokens for slot, draft in drafts.items()}


def drafter(rows: int, *, most: int = 3) -> Drafter:
    """Return a drafter that knows the time of a step without drafts, and that more tokens take no longer."""
    made = Drafter(most, 256, runs_ahead=True)
    for tokens in (rows, 4 * rows):
        empty = StepRows(None, [StepRow(sequence, 0, 1, samples=True) for sequence in sequences(tokens)])
        made.took(empty, 0.01, began_ahead=True)
    return made


def test_a_step_waits_for_the_one_before_only_to_have_drafts() -> None:
    it = drafter(2)
    assert not it.pay_after(sequences(2), prompts=False)
    repeating = sequences(2, repeats=2)
    assert it.may_draft(2)
    assert it.pay_after(repeating, prompts=False)
    assert it.may_draft(2)
    assert tokens_of(it.drafts(repeating)) == {0: (1, 2, 3), 1: (2, 3, 4)}


def test_a_step_seldom_waits_where_drafts_seldom_follow() -> None:
    it, repeating = drafter(2), sequences(2, repeats=2)
    waits = 0
    for _ in range(100):
        it.may_draft(2)
        if it.pay_after(repeating, prompts=False):
            waits += 1
            assert it.drafts([]) == {}
    assert 0 < waits < 40


def test_a_sequence_without_drafts_has_none() -> None:
    it, repeating = drafter(2), sequences(2, repeats=2)
    repeating[0].no_drafts = True
    assert tokens_of(it.drafts(repeating)) == {1: (2, 3, 4)}


class Sevens:
    """Predicts nothing but 7."""

    has_prompts = False

    def __init__(self) -> None:
        self.asked: list[dict[int, int]] = []
        self.prompts = False

    def may_follow(self, sequence: Sequence) -> bool:
        return True

    def drafts(self, lengths: Mapping[int, int], *, prompts: bool) -> dict[int, tuple[int, ...]]:
        self.asked.append(dict(lengths))
        self.prompts |= prompts
        return {slot: (7,) * length for slot, length in lengths.items()}


def test_predictions_are_asked_for_where_they_pay_and_nothing_is_found() -> None:
    it, predictor = drafter(2), Sevens()
    it.predictor = predictor
    assert it.pay_after(sequences(2), prompts=False)
    found, (_, other) = sequences(2, repeats=2)[0], sequences(2)
    assert tokens_of(it.drafts([found, other])) == {0: (1, 2, 3), 1: (7, 7, 7)}
    assert predictor.asked == [{1: 3}]
    for _ in range(60):
        it.verified([Drafting(1, 3, 0, MTP, [(0, 3, 0)])])
    assert it.drafts([other]) == {}
    predictor.has_prompts = True
    assert not it.pay_after([other], prompts=True)
    for _ in range(RETRY_STEPS - 1):
        assert it.drafts([other]) == {}
    assert len(predictor.asked) == 1
    assert it.pay_after([other], prompts=True)
    assert tokens_of(it.drafts([other])) == {1: (7, 7, 7)}


@pytest.mark.parametrize(("seconds", "computed"), [(0.016, True), (0.023, False)])
def test_prompts_are_computed_where_predicted_tokens_pay_for_them(seconds: float, computed: bool) -> None:
    """Steps of 4 rows take 10 ms. Three of four drafted tokens are right, and make 2.7 of one in `seconds`: 1.7 or 1.18 times as many."""
    it, predictor = drafter(4), Sevens()
    it.predictor, predictor.has_prompts = predictor, True
    for _ in range(100):
        waiting = StepRows(None, [StepRow(sequence, 0, 1, samples=True) for sequence in sequences(16)])
        it.took(waiting, seconds, began_ahead=False)
        it.verified([Drafting(1, 3, 3, MTP, [(0, 3, 3)]), Drafting(1, 3, 0, MTP, [(0, 3, 0)])])
    assert len(tokens_of(it.drafts(sequences(4)))) == 4
    assert predictor.prompts == computed
    # A long prompt alone: no sequence decodes, and none has drafts.
    predictor.asked.clear()
    assert it.drafts([]) == {}
    assert bool(predictor.asked) == computed == it.pay_after([], prompts=True)


def test_predicted_tokens_are_in_the_place_of_synthetic_ones() -> None:
    it, predictor = drafter(2), Sevens()
    it.accept_synthetically(2.6, 331)
    it.predictor = predictor
    assert tokens_of(it.drafts(sequences(2))) == {0: (7, 7, 7), 1: (7, 7, 7)}


@pytest.mark.parametrize(
    ("seconds_each", "prompts", "tokens"), [(0.0001, False, 3), (0.006, False, 1), (0.02, False, 0), (0.02, True, 3)]
)
def test_no_more_tokens_are_predicted_than_pay_for_their_time(
    monkeypatch: pytest.MonkeyPatch, seconds_each: float, prompts: bool, tokens: int
) -> None:
    """That of prompts does not count."""
    it, predictor, now = (
        drafter(2),
        Sevens(),
        [0.0],
    )  # a step takes 10 ms, and three of four tokens are taken to be right
    it.predictor, predict = predictor, predictor.drafts
    monkeypatch.setattr(drafter_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def timed(lengths: Mapping[int, int], *, prompts: bool) -> dict[int, tuple[int, ...]]:
        now[0] += seconds_each * max(lengths.values())
        predictor.has_prompts = False  # they are computed
        return predict(lengths, prompts=prompts)

    monkeypatch.setattr(predictor, "drafts", timed)
    lengths = []
    for _ in range(3):
        predictor.has_prompts = prompts
        lengths.append(len(it.drafts(sequences(2)).get(0, Draft((), "", 0)).tokens))
    assert lengths == [3, tokens, tokens]


def test_many_sequences_without_drafts_are_looked_at_in_one_of_some_steps() -> None:
    it = drafter(MANY)
    looked = [it.may_draft(MANY) for _ in range(QUIET_STEPS + 10 * PAUSE)]
    assert looked[:QUIET_STEPS] == [True] * QUIET_STEPS
    assert sum(looked[QUIET_STEPS:]) == 10


def test_no_draft_is_longer_than_the_blocks_of_its_sequence() -> None:
    it, (sequence,) = drafter(1, most=8), sequences(1, repeats=2)
    sequence.end = len(sequence.tokens) + 2
    assert tokens_of(it.drafts([sequence])) == {0: (1, 2)}


@pytest.mark.parametrize(("most", "tokens"), [(3, 2.6), (8, 3.0), (3, 4.0), (1, 1.25)])
def test_synthetic_drafts_yield_the_tokens_asked_for(most: int, tokens: float) -> None:
    it = drafter(1, most=most)
    it.accept_synthetically(tokens, VOCABULARY)
    assert it.synthetic is not None
    (sequence,) = sequences(1)
    steps, taken = 4000, 0
    for step in range(steps):
        draft = it.synthetic.drafts(sequence, most)
        assert draft is not None
        row = StepRow(sequence, len(sequence.tokens) - 1, 1 + most, samples=True, drafts=draft.tokens)
        output = SamplerOutput([step % VOCABULARY] * (1 + most), [0.0] * (1 + most))
        rows = StepRows(None, [row])
        it.synthetic.judge(rows, output)
        taken += take_tokens(row, 0, output)[0]
        sequence.generated = 0
        del sequence.tokens[40:]
    assert taken / steps == pytest.approx(tokens, rel=0.03)
    assert probability_of(tokens, most) <= 1


def test_drafts_are_counted() -> None:
    first, second, third, ended = sequences(4)
    rows = StepRows(
        None,
        [
            StepRow(first, 29, 4, samples=True, drafts=(1, 2, 3), draft_source="own"),
            StepRow(second, 29, 1, samples=True),
            StepRow(third, 29, 3, samples=True, drafts=(1, 2), draft_source="recent"),
            StepRow(ended, 29, 4, samples=True, drafts=(1, 2, 3), draft_source="mtp"),
        ],
    )
    counted = drafting_of(rows, StepResult(slots=[1, 0, 3], token_counts=[1, 3, 2], token_ids=[5, 1, 2, 9, 1, 2]))
    assert counted == [
        Drafting(1, 3, 2, "own", [(0, 3, 2)]),
        Drafting(1, 2, 0, "recent"),
        Drafting(1, 3, 2, "mtp", [(3, 3, 2)]),
    ]
    assert drafting_of(StepRows(None, rows.others[1:2]), StepResult(slots=[1])) == []
