"""Drafts by lookup: they go on as the text did before, in the bounds of scopes, time and memory."""

from __future__ import annotations

import random
from typing import Any

import pytest

from text_generation_proto.values import Stopping
from text_generation_shard.engine import NewSequence
from text_generation_shard.step.drafts.length import Acceptance
from text_generation_shard.step.drafts.lookup import INDEXED_TOKENS, TOKENS_AT_ONCE, LookupDrafts, TokenIndex
from text_generation_shard.step.sequence import Sequence

TEXT = tuple(random.Random(1).sample(range(50_000), 400))


@pytest.fixture
def acceptance() -> Acceptance:
    return Acceptance()


@pytest.fixture
def source(acceptance: Acceptance) -> LookupDrafts:
    return LookupDrafts(acceptance)


def sequence(prompt: tuple[int, ...], slot: int = 0, scope: str = "", adapter: str = "", **more: Any) -> Sequence:  # noqa: ANN401
    return Sequence.of(NewSequence(slot, prompt, Stopping(1000), draft_scope=scope, adapter=adapter, **more))


def drafted(source: LookupDrafts, of: Sequence, most: int = 6) -> tuple[int, ...]:
    """Return its draft in a step of its own."""
    source.forget_ended()
    draft = source.drafts(of, most)
    return () if draft is None else draft.tokens


def test_a_draft_goes_on_as_the_text_did(source: LookupDrafts) -> None:
    it = sequence((*TEXT, 7, *TEXT[100:103]))
    assert drafted(source, it) == TEXT[103:109]
    it.tokens.extend(TEXT[103:106])
    assert drafted(source, it, 2) == TEXT[106:108]
    it.tokens.extend((1,))
    assert drafted(source, it) == ()
    it.tokens.extend(TEXT[200:202])
    assert drafted(source, it) == ()
    it.tokens.extend(TEXT[202:203])
    assert drafted(source, it) == TEXT[203:209]


def test_a_text_is_followed_again_after_an_edit(source: LookupDrafts) -> None:
    it = sequence((*TEXT, 7, *TEXT[100:104]))
    assert drafted(source, it, 2) == TEXT[104:106]
    for edit in (60_000, 60_001):
        it.tokens.append(edit)
        assert drafted(source, it) == ()
    it.tokens.append(TEXT[105])
    assert drafted(source, it, 3) == TEXT[106:109]


def test_a_repetition_is_continued(source: LookupDrafts) -> None:
    assert drafted(source, sequence((1, 2, 3, 4, 1, 2, 3, 4, 1)), 6) == (2, 3, 4, 1, 2, 3)


def test_the_longer_match_wins(source: LookupDrafts) -> None:
    start, end = (11, 12, 13, 14, 15), (13, 14, 15)
    assert drafted(source, sequence((*start, 1, 2, 0, *end, 3, 4, 0, *start)), 2) == (1, 2)


def test_tokens_that_differ_are_learnt(source: LookupDrafts, acceptance: Acceptance) -> None:
    it = sequence((*TEXT, *TEXT[:3]))
    for token in TEXT[3:300]:
        assert drafted(source, it, 1) == (token,)
        it.tokens.append(token)
    assert acceptance.probability("own", 20) > 0.95
    for place in range(0, 300, 5):
        it.tokens.extend(TEXT[place : place + 3])
        drafted(source, it)
        it.tokens.append(3)
        drafted(source, it)
    assert acceptance.probability("own", 3) < 0.2


def test_an_output_is_found_by_sequences_of_its_scope_only(source: LookupDrafts) -> None:
    ended = sequence((1,), scope="a")
    drafted(source, ended)
    ended.tokens.extend(TEXT)
    drafted(source, ended)
    ended.is_held = False
    source.forget_ended()
    prompt = (9, *TEXT[50:53])
    assert drafted(source, sequence(prompt, 1, scope="a")) == TEXT[53:59]
    assert drafted(source, sequence((9, *TEXT[396:399]), 4, scope="a")) == TEXT[399:]
    assert drafted(source, sequence(prompt, 2, scope="b")) == ()
    assert drafted(source, sequence(prompt, 3, scope="a", adapter="x")) == ()


def test_a_slot_that_is_used_again_has_no_draft_of_the_sequence_before(source: LookupDrafts) -> None:
    drafted(source, sequence((*TEXT, 7), scope="a"))
    assert drafted(source, sequence((3, *TEXT[5:8]), scope="b")) == ()


def test_a_long_prompt_is_indexed_in_parts(source: LookupDrafts) -> None:
    prompt = tuple(random.Random(2).randrange(50_000) for _ in range(3 * TOKENS_AT_ONCE)) + TEXT + (5,) + TEXT[:4]
    it = sequence(prompt)
    drafts = [drafted(source, it) for _ in range(5)]
    assert drafts[:3] == [(), (), ()]
    assert drafts[4] == TEXT[4:10]


def test_a_step_indexes_long_prompts_one_after_the_other(source: LookupDrafts) -> None:
    most = TOKENS_AT_ONCE - 300
    others = tuple(random.Random(2).randrange(50_000) for _ in range(most - 404))
    sequences = [sequence((*others, *TEXT, 60_000 + slot, *TEXT[:3]), slot) for slot in range(3)]
    for step in range(3):
        source.forget_ended()
        drafts = [source.drafts(each, 2) for each in sequences]
        assert [draft is not None for draft in drafts] == [slot <= step for slot in range(3)]


def test_a_prediction_is_followed_from_its_start_and_after_edits(source: LookupDrafts, acceptance: Acceptance) -> None:
    it = sequence((1, 2), prediction=TEXT)
    it.tokens.extend(TEXT[:1])
    draft = source.drafts(it, 3)
    assert draft is not None
    assert (draft.tokens, draft.source) == (TEXT[1:4], "prediction")
    it.tokens.extend((*TEXT[1:9], 60_000))
    assert drafted(source, it) == ()
    it.tokens.extend(TEXT[10:12])
    assert drafted(source, it, 2) == TEXT[12:14]
    it.tokens.extend((60_001, *TEXT[300:303]))
    assert drafted(source, it, 2) == TEXT[303:305]
    it.tokens.extend((60_002, *TEXT[397:]))
    assert drafted(source, it) == ()
    assert acceptance.probability("prediction", 20) > acceptance.probability("own", 20) - 0.01


def test_a_prediction_with_another_start_is_followed_once_it_is_met(source: LookupDrafts) -> None:
    it = sequence((1, 2), prediction=TEXT)
    it.tokens.extend((60_000, TEXT[0]))
    assert drafted(source, it, 2) == TEXT[1:3]
    other = sequence((1, 2), 1, prediction=TEXT)
    other.tokens.extend((60_000, *TEXT[50:53]))
    assert drafted(source, other, 2) == TEXT[53:55]


def test_a_preempted_sequence_goes_on_with_its_prediction(source: LookupDrafts, acceptance: Acceptance) -> None:
    before = acceptance.probability("prediction", 0)
    it = sequence((1, 2, *TEXT[:5]), prediction=TEXT, generated_tokens=5)
    it.tokens.extend(TEXT[5:6])
    assert drafted(source, it, 2) == TEXT[6:8]
    assert acceptance.probability("prediction", 0) > before


def test_a_prediction_is_that_of_its_sequence_only(source: LookupDrafts) -> None:
    it = sequence((1, 2), prediction=TEXT)
    it.tokens.extend(TEXT[:4])
    assert drafted(source, it, 1) == TEXT[4:5]
    other = sequence((1, 2), 1)
    other.tokens.extend(TEXT[:4])
    assert drafted(source, other) == ()
    it.is_held = False
    source.forget_ended()
    reused = sequence((1, 2))
    reused.tokens.extend(TEXT[100:104])
    assert drafted(source, reused) == ()


def test_a_long_prediction_is_indexed_in_parts_up_to_a_bound(source: LookupDrafts) -> None:
    far = [random.Random(3).randrange(50_000) for _ in range(INDEXED_TOKENS - 300)]
    it = sequence((1, 2), prediction=(*far, *TEXT))
    it.tokens.extend(TEXT[50:54])
    parts = INDEXED_TOKENS // TOKENS_AT_ONCE + 1  # the last one for its own text
    drafts = [drafted(source, it, 2) for _ in range(parts)]
    assert drafts == [()] * (parts - 1) + [TEXT[54:56]]
    it.tokens.extend((60_000, *TEXT[350:354]))
    assert drafted(source, it) == ()  # not indexed


def test_many_tokens_are_indexed_as_single_ones_are() -> None:
    text = list(TEXT * 2)
    at_once, one_by_one = TokenIndex(text, 10), TokenIndex(text, 10)
    at_once.extend(800)
    for end in range(801):
        one_by_one.extend(end)
    for end in range(20, 400):
        found = at_once.find(text[end - 8 : end])
        assert found == one_by_one.find(text[end - 8 : end])
        assert found == (end + 400, 8)
