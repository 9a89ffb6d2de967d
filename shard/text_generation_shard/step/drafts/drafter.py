"""The drafts of a step: which sequences have some, and how many tokens."""

import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Sequences
from dataclasses import replace
from itertools import islice
from operator import eq
from typing import Protocol

from text_generation_proto.values import MTP
from text_generation_shard.engine import Drafting, EngineInfo, StepResult
from text_generation_shard.step.drafts.length import LEAST_GAIN, Acceptance, DraftLengths, StepTimes
from text_generation_shard.step.drafts.lookup import LookupDrafts
from text_generation_shard.step.drafts.synthetic import SyntheticDrafts
from text_generation_shard.step.sequence import Draft, Sequence, StepRows

MANY = 32
QUIET_STEPS = 32
PAUSE = 4
"""With MANY rows, and without drafts for QUIET_STEPS, drafts are looked for in one of PAUSE steps."""


PREDICTED_MATCH = 9
"""The length of a match as likely right as predicted tokens, until some were verified."""
PROMPT_SPEEDUP = 1.2
"""Least factor of tokens per second with which predicted tokens pay for the prompts, whose answers have unknown lengths: with 64
sequences of an 8B model on an H200, 128 tokens after 512 gained what the 512 cost at 1.24."""
RETRY_STEPS = 512
"""Steps without predicted tokens after which they are tried again."""


class Predictor(Protocol):
    """A part of the model that predicts tokens once they are wanted."""

    @property
    def has_prompts(self) -> bool:
        """True if it is behind by chunks of prompts."""
        ...

    def may_follow(self, sequence: Sequence) -> bool:
        """Return True if there can be drafts of the sequence."""
        ...

    def drafts(self, lengths: Mapping[int, int], *, prompts: bool) -> dict[int, tuple[int, ...]]:
        """Return drafts of these lengths, by slot; not those after chunks of prompts, which are skipped, unless `prompts`."""
        ...


class Drafter:
    """Drafts tokens where that is expected to be faster. Told of each step, from which it learns."""

    def __init__(self, most: int, max_tokens: int, *, runs_ahead: bool, predicted: str = MTP) -> None:
        """`most` tokens of a draft; `max_tokens` of the decoding rows of a step; `predicted`: the source of those of a predictor."""
        self.most = most
        self._predicted = predicted
        self.synthetic: SyntheticDrafts | None = None
        """The source in the place of a lookup, in measurements."""
        self.predictor: Predictor | None = None
        self._unpredicted = 0
        """Steps that were asked for since one had predicted drafts."""
        self._passes = StepTimes()
        """Seconds of a token of predicted drafts, by number of rows."""
        self._predicting_s = 0.0
        """Seconds of predictions since the last step was recorded."""
        self._acceptance = Acceptance()
        self._lookup = LookupDrafts(self._acceptance)
        self._quiet = 0
        """Steps that were asked for since one had drafts."""
        self._waited = False
        """True if the next step waits for the tokens of the one before, to have drafts."""
        self._worth = 1.0
        """Share of such steps that had drafts."""
        self._may_pay: dict[int, bool] = {}
        """By number of rows."""
        plain = StepTimes()
        self._lengths = DraftLengths(max_tokens, plain, StepTimes() if runs_ahead else plain)

    @classmethod
    def of(cls, info: EngineInfo, *, runs_ahead: bool, predicted: str = MTP) -> "Drafter | None":
        """Return the drafter of an engine; None if it drafts nothing."""
        most = info.max_tokens_per_step - 1
        return cls(most, info.max_slots, runs_ahead=runs_ahead, predicted=predicted) if most > 0 else None

    def accept_synthetically(self, tokens: float, vocab_size: int) -> None:
        """Take drafts as right so that a step with the longest ones yields `tokens` tokens of a sequence on average."""
        self.synthetic = SyntheticDrafts(self._acceptance, self.most, tokens, vocab_size)

    def may_draft(self, rows: int) -> bool:
        """Return False if no step with so many rows should have drafts, whatever its sequences are."""
        if self._waited:  # the step was counted
            return True
        self._quiet += 1
        if rows >= MANY and self._quiet > QUIET_STEPS and self._quiet % PAUSE:
            return False
        if self._quiet % PAUSE == 0 or rows not in self._may_pay:
            if len(self._may_pay) > MANY:
                self._may_pay.clear()
            self._may_pay[rows] = self._lengths.may_pay(rows, self.most)
        return self._may_pay[rows]

    def drafts(self, sequences: Sequences[Sequence]) -> dict[int, Draft]:
        """Return the drafts of the next step, by slot; `sequences` are all that it continues."""
        candidates, lengths = self._candidates(sequences, lead=0)
        drafts = {
            sequence.slot: replace(draft, tokens=draft.tokens[:length])
            for (sequence, draft), length in zip(candidates, lengths, strict=True)
            if length
        }
        if self.predictor is not None:
            self._predict(self.predictor, drafts, len(sequences))
        if drafts:
            self._quiet = 0
        if self._waited:
            self._waited, self._worth = False, self._worth + (bool(drafts) - self._worth) / PAUSE
        return drafts

    def _predict(self, predictor: Predictor, drafts: dict[int, Draft], rows: int) -> None:
        """Fill in the predicted ones of the drafts."""
        wanted = {slot: len(draft.tokens) for slot, draft in drafts.items() if draft.source == self._predicted}
        prompts = predictor.has_prompts and self._pays_for_prompts(rows)
        if wanted or prompts:
            started = time.perf_counter()
            found = predictor.drafts(wanted, prompts=prompts)
            self._predicting_s = time.perf_counter() - started
            for slot in wanted:
                draft = drafts.pop(slot)
                if slot in found:
                    drafts[slot] = replace(draft, tokens=found[slot])
            if wanted and not prompts:
                self._passes.add(rows, self._predicting_s / max(wanted.values()))
        self._unpredicted = 0 if wanted else self._unpredicted + 1
        if self._unpredicted >= RETRY_STEPS:
            self._acceptance.forget(self._predicted)
            self._unpredicted = 0

    def pay_after(self, sequences: Sequences[Sequence], *, prompts: bool) -> bool:
        """Return True if the step after the one in progress, whose tokens are not known, should have drafts.

        It then waits for these tokens. If there are mostly no drafts after all, it does so in one of PAUSE steps only. It also
        waits if the one in progress has `prompts` for the predictor.
        """
        if any(self._candidates(sequences, lead=1)[1]):
            self._waited = self._worth > 0.5 or self._quiet % PAUSE == 0
        return self._waited or (prompts and self._pays_for_prompts(len(sequences)))

    def _pays_for_prompts(self, rows: int) -> bool:
        """Return True if predicted tokens of so many rows, or of a first one, are worth the time of the prompts."""
        if self.predictor is None:
            return False
        rows = max(rows, 1)
        gains = self._acceptance.gains(self._predicted, PREDICTED_MATCH, self.most)
        return self._lengths.speedup(rows, gains, self._passes.expected(rows) or 0.0) >= PROMPT_SPEEDUP

    def _candidates(
        self, sequences: Sequences[Sequence], lead: int
    ) -> tuple[list[tuple[Sequence, Draft]], Iterable[int]]:
        source = self.synthetic or self._lookup
        source.forget_ended()
        candidates: list[tuple[Sequence, Draft]] = []
        predicted: list[tuple[Sequence, Draft]] = []
        for sequence in sequences:
            most = min(self.most + lead, sequence.end - len(sequence.tokens))
            if sequence.no_drafts or (sequence.matcher is not None and not sequence.matcher.is_quick):
                continue
            # In measurements a predictor takes the time of its drafts.
            is_asked = self.synthetic is None or self.predictor is None
            if is_asked and (draft := source.drafts(sequence, most)) is not None:
                candidates.append((sequence, draft))
            elif self.predictor is not None and most > lead and (lead or self.predictor.may_follow(sequence)):
                # Its tokens are not known yet, and none of them comes with a step in progress.
                predicted.append((sequence, Draft((0,) * (most - lead), self._predicted, PREDICTED_MATCH)))
        if not candidates and not predicted:
            return [], []
        gains = [self._acceptance.gains(draft.source, draft.match, len(draft.tokens)) for _, draft in candidates]
        cost = self._prediction_cost(len(sequences), len(predicted))
        for _, draft in predicted:
            own = self._acceptance.gains(draft.source, draft.match, len(draft.tokens))
            gains.append([1.0] * lead + [gain - cost for gain in own if gain - cost > LEAST_GAIN])
        candidates += predicted
        chosen = self._lengths.choose(len(sequences), gains, lead)
        return ([], []) if chosen is None else (candidates, chosen)

    def _prediction_cost(self, rows: int, predicted: int) -> float:
        """Return the tokens of a row that are not computed in the time of a predicted token, with so many rows that have some."""
        pass_s, step_s = self._passes.expected(rows), self._lengths.plain.expected(rows)
        return 0.0 if not (pass_s and step_s and predicted) else pass_s / step_s * rows / predicted

    def verified(self, found: Iterable[Drafting]) -> None:
        """Learn from the drafts of a step that is recorded."""
        self._predicting_s = 0.0
        for told in found:
            for _, drafted, accepted in told.by_slot if told.source == self._predicted else ():
                for place in range(min(accepted + 1, drafted)):
                    self._acceptance.add(self._predicted, PREDICTED_MATCH, right=place < accepted)

    def took(self, rows: StepRows, seconds: float, *, began_ahead: bool) -> None:
        """Learn from the time between the records of a step without prompts and of the one before."""
        seconds -= self._predicting_s
        self._lengths.add(rows.tokens, seconds, drafted=bool(rows.drafting), began_ahead=began_ahead)


def drafting_of(rows: StepRows, result: StepResult) -> list[Drafting]:
    """Return the counts of the drafts in a step, by source."""
    told: dict[str, Drafting] = {}
    taken: dict[int, list[int]] = {}
    if drafting := rows.drafting:
        ids = iter(result.token_ids)
        taken = {slot: [*islice(ids, count)] for slot, count in zip(result.slots, result.token_counts, strict=True)}
    for _, row in drafting:
        slot, drafted = row.sequence.slot, len(row.drafts)
        if (of := told.get(row.draft_source)) is None:
            of = told[row.draft_source] = Drafting(source=row.draft_source)
        of.drafts += 1
        of.draft_tokens += drafted
        if tokens := taken.get(slot):
            # The last one is a draft, too, if it ends the sequence or the mask behind it is not known.
            accepted = sum(map(eq, tokens, row.drafts))
            of.accepted_tokens += accepted
            of.by_slot.append((slot, drafted, accepted))
    return [*told.values()]
