"""The drafts of a step: which sequences have some, and how many tokens."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Sequences
from dataclasses import replace

from text_generation_shard.engine import Drafting, EngineInfo, StepResult
from text_generation_shard.step.drafts.length import Acceptance, DraftLengths, StepTimes
from text_generation_shard.step.drafts.lookup import LookupDrafts
from text_generation_shard.step.drafts.synthetic import SyntheticDrafts
from text_generation_shard.step.sequence import Draft, Sequence, StepRows

MANY = 32
QUIET_STEPS = 32
PAUSE = 4
"""With MANY rows, and without drafts for QUIET_STEPS, drafts are looked for in one of PAUSE steps."""


class Drafter:
    """Drafts tokens where that is expected to be faster. Told of each step, from which it learns."""

    def __init__(self, most: int, max_tokens: int, *, runs_ahead: bool) -> None:
        """`most` tokens of a draft; `max_tokens` of the decoding rows of a step."""
        self.most = most
        self.synthetic: SyntheticDrafts | None = None
        """The source in the place of a lookup, in measurements."""
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
    def of(cls, info: EngineInfo, *, runs_ahead: bool) -> Drafter | None:
        """Return the drafter of an engine; None if it drafts nothing."""
        most = info.max_tokens_per_step - 1
        return cls(most, info.max_slots, runs_ahead=runs_ahead) if most > 0 else None

    def accept_synthetically(self, tokens: float, vocab_size: int) -> None:
        """Take drafts as right so that a step with the longest ones yields `tokens` tokens of a sequence on average."""
        self.synthetic = SyntheticDrafts(self._acceptance, self.most, tokens, vocab_size)

    def may_draft(self, rows: int) -> bool:
        """Return False if no step with so many rows should have drafts, whatever its sequences are."""
        self._quiet += 1
        if self._waited:
            return True
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
        if drafts:
            self._quiet = 0
        if self._waited:
            self._waited, self._worth = False, self._worth + (bool(drafts) - self._worth) / PAUSE
        return drafts

    def pay_after(self, sequences: Sequences[Sequence]) -> bool:
        """Return True if the step after the one in progress, whose tokens are not known, should have drafts.

        It then waits for these tokens. If there are mostly no drafts after all, it does so in one of PAUSE steps only.
        """
        if any(self._candidates(sequences, lead=1)[1]):
            self._waited = self._worth > 0.5 or self._quiet % PAUSE == 0
        return self._waited

    def _candidates(
        self, sequences: Sequences[Sequence], lead: int
    ) -> tuple[list[tuple[Sequence, Draft]], Iterable[int]]:
        source = self.synthetic or self._lookup
        source.forget_ended()
        candidates = [
            (sequence, draft)
            for sequence in sequences
            if (sequence.matcher is None or sequence.matcher.is_quick)
            and (draft := source.drafts(sequence, min(self.most + lead, sequence.end - len(sequence.tokens))))
        ]
        if not candidates:
            return [], []
        gains = [self._acceptance.gains(draft.source, draft.match, len(draft.tokens)) for _, draft in candidates]
        chosen = self._lengths.choose(len(sequences), gains, lead)
        return ([], []) if chosen is None else (candidates, chosen)

    def took(self, rows: StepRows, seconds: float, *, began_ahead: bool) -> None:
        """Learn from the time between the records of a step without prompts and of the one before."""
        self._lengths.add(rows.tokens, seconds, drafted=bool(rows.drafting), began_ahead=began_ahead)


def drafting_of(rows: StepRows, result: StepResult) -> list[Drafting]:
    """Return the counts of the drafts in a step, by source."""
    told: dict[str, Drafting] = {}
    drafting = rows.drafting
    counts = dict(zip(result.slots, result.token_counts, strict=True)) if drafting else {}
    for _, row in drafting:
        slot, drafted = row.sequence.slot, len(row.drafts)
        if (of := told.get(row.draft_source)) is None:
            of = told[row.draft_source] = Drafting(source=row.draft_source)
        of.drafts += 1
        of.draft_tokens += drafted
        if count := counts.get(slot, 0):
            accepted = min(count - 1, drafted)
            of.accepted_tokens += accepted
            of.by_slot.append((slot, drafted, accepted))
    return [*told.values()]
