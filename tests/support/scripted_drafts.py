"""Drafts that a test knows to be right or wrong, in the place of an engine's drafter."""

from __future__ import annotations

import random
from collections.abc import Sequence as Sequences

from text_generation_proto.values import EAGLE, MTP, OWN
from text_generation_shard.engine import Engine
from text_generation_shard.engines.torch.engine.engine import TorchEngine
from text_generation_shard.step.drafts.drafter import Drafter, Predictor
from text_generation_shard.step.sequence import Draft, Sequence, StepRows


class ScriptedDrafts(Drafter):
    """Drafts the tokens that `texts` go on with, some of them replaced; at random also none, or any tokens.

    The share `predicted` of the drafts of a sequence with a prediction is looked up instead.
    """

    def __init__(
        self, texts: Sequences[Sequences[int]], vocab_size: int, seed: int = 0, *, predicted: float = 0.5
    ) -> None:
        super().__init__(8, 1 << 30, runs_ahead=True)
        self._texts = texts
        self._vocab_size = vocab_size
        self._draw = random.Random(seed)
        self._looked_up = predicted

    def may_draft(self, rows: int) -> bool:
        return True

    def drafts(self, sequences: Sequences[Sequence]) -> dict[int, Draft]:
        self._lookup.forget_ended()
        if self.predictor is not None and self._draw.random() < 0.5:
            return self._predicted_drafts(self.predictor, sequences)
        drafted = {sequence.slot: self._draft(sequence) for sequence in sequences}
        return {slot: draft for slot, draft in drafted.items() if draft is not None and draft.tokens}

    def _predicted_drafts(self, predictor: Predictor, sequences: Sequences[Sequence]) -> dict[int, Draft]:
        lengths = {
            each.slot: min(self._draw.randrange(9), each.end - len(each.tokens))
            for each in sequences
            if predictor.may_follow(each) and (each.matcher is None or each.matcher.is_quick)
        }
        found = predictor.drafts(lengths, prompts=self._draw.random() < 0.9)
        right = {each.slot: self._right(each) for each in sequences if self._draw.random() < 0.7}
        drafts = {slot: (*right.get(slot, ())[: self._draw.randrange(9)],) for slot in found}
        return {
            slot: Draft((*drafts[slot], *tokens[len(drafts[slot]) :])[: len(tokens)], self._predicted, 0)
            for slot, tokens in found.items()
        }

    def _draft(self, sequence: Sequence) -> Draft | None:
        count = len(sequence.tokens)
        most = min(self._draw.randrange(9), sequence.end - count)
        if most < 1 or (sequence.matcher is not None and not sequence.matcher.is_quick):
            return None
        if sequence.prediction and self._draw.random() < self._looked_up:
            return self._lookup.drafts(sequence, most)
        right = self._right(sequence)[:most] or [self._draw.randrange(self._vocab_size) for _ in range(most)]
        errors = self._draw.choice((0.0, 0.1, 0.5))
        draw = self._draw
        tokens = tuple(draw.randrange(self._vocab_size) if draw.random() < errors else each for each in right)
        return Draft(tokens, OWN, 0)

    def _right(self, sequence: Sequence) -> Sequences[int]:
        """Return the tokens that a sequence goes on with, if they are known."""
        count = len(sequence.tokens)
        return next((text[count:] for text in self._texts if [*text[:count]] == [*sequence.tokens]), ())

    def pay_after(self, sequences: Sequences[Sequence], *, prompts: bool) -> bool:
        return self._draw.random() < 0.6

    def took(self, rows: StepRows, seconds: float, *, began_ahead: bool) -> None:
        pass


class DraftsOf(ScriptedDrafts):
    """Drafts of one source; of predicted ones, some are made right."""

    def __init__(self, source: str, texts: Sequences[Sequences[int]], vocab_size: int, seed: int) -> None:
        super().__init__(texts, vocab_size, seed)
        self._source = self._predicted = source

    def drafts(self, sequences: Sequences[Sequence]) -> dict[int, Draft]:
        self._lookup.forget_ended()
        if self._source in (MTP, EAGLE):
            assert self.predictor is not None
            return self._predicted_drafts(self.predictor, sequences)
        return {
            each.slot: draft
            for each in sequences
            if each.matcher is None or each.matcher.is_quick
            if (draft := self._lookup.drafts(each, min(8, each.end - len(each.tokens)))) is not None
            if draft.source == self._source and self._draw.random() < 0.9
        }


class Predicted(Drafter):
    """Drafts of `most` predicted tokens in each step, some of which are made right, so that steps yield several tokens."""

    def __init__(self, most: int, texts: Sequences[Sequences[int]] = ()) -> None:
        super().__init__(most, 1 << 30, runs_ahead=True)
        self.texts = texts
        self.found: list[tuple[list[int], tuple[int, ...]]] = []
        """Tokens of a sequence, and those predicted after them."""

    def may_draft(self, rows: int) -> bool:
        return True

    def pay_after(self, sequences: Sequences[Sequence], *, prompts: bool) -> bool:
        return True

    def drafts(self, sequences: Sequences[Sequence]) -> dict[int, Draft]:
        assert self.predictor is not None
        lengths = {
            each.slot: min(self.most, each.end - len(each.tokens))
            for each in sequences
            if self.predictor.may_follow(each)
        }
        found = self.predictor.drafts(lengths, prompts=True)
        assert {slot: len(tokens) for slot, tokens in found.items()} == {
            slot: length for slot, length in lengths.items() if length > 0
        }
        self.found += [(list(each.tokens), found[each.slot]) for each in sequences if each.slot in found]
        drafts = {}
        for each in sequences:
            if each.slot in found:
                text = next((text for text in self.texts if [*text[: len(each.tokens)]] == [*each.tokens]), ())
                right = tuple(text[len(each.tokens) :][: len(each.tokens) % self.most])
                tokens = (*right, *found[each.slot][len(right) :])
                drafts[each.slot] = Draft(tokens[: lengths[each.slot]], self._predicted, 0)
        return drafts


def draft_by(engine: Engine, drafter: Drafter | None) -> None:
    """Replace the drafter of an engine; None: it drafts nothing."""
    assert isinstance(engine, TorchEngine)
    assert engine.info.max_tokens_per_step > 1
    engine.drafter = drafter
    if drafter is not None:
        drafter.predictor = engine.predictions
