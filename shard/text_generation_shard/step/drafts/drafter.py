"""The drafts of a step: which sequences have some, and how many tokens."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Sequences

from text_generation_shard.engine import Drafting, EngineInfo, StepResult
from text_generation_shard.step.drafts.length import Acceptance, DraftLengths, StepTimes
from text_generation_shard.step.drafts.lookup import Draft, LookupDrafts
from text_generation_shard.step.drafts.synthetic import SyntheticDrafts
from text_generation_shard.step.sequence import Sequence, StepRows

MANY = 32
QUIET_STEPS = 32
PAUSE = 4
"""With MANY sequences, and without drafts for QUIET_STEPS, drafts are looked for in one of so many steps."""


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
        """Steps since one had drafts."""
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

    def drafts(self, sequences: Sequences[Sequence]) -> dict[int, tuple[int, ...]]:
        """Return the drafts of the next step, by slot; `sequences` are all that it continues."""
        candidates, lengths = self._candidates(sequences, lead=0)
        return {
            sequence.slot: draft.tokens[:length]
            for (sequence, draft), length in zip(candidates, lengths, strict=True)
            if length
        }

    def pay_after(self, sequences: Sequences[Sequence]) -> bool:
        """Return True if the step after the one in progress, whose tokens are not known, should have drafts."""
        return any(self._candidates(sequences, lead=1)[1])

    def _candidates(
        self, sequences: Sequences[Sequence], lead: int
    ) -> tuple[list[tuple[Sequence, Draft]], Iterable[int]]:
        self._quiet += 1
        if not self._lengths.may_pay(len(sequences), self.most):
            return [], []
        if len(sequences) >= MANY and self._quiet > QUIET_STEPS and self._quiet % PAUSE:
            return [], []
        source = self.synthetic or self._lookup
        source.forget_ended()
        candidates = [
            (sequence, draft)
            for sequence in sequences
            if (sequence.matcher is None or sequence.matcher.is_quick)
            and (draft := source.drafts(sequence, min(self.most + lead, sequence.end - len(sequence.tokens))))
        ]
        gains = [self._acceptance.gains(draft.source, draft.match, len(draft.tokens)) for _, draft in candidates]
        chosen = self._lengths.choose(len(sequences), gains, lead) if candidates else None
        if chosen is None:
            return [], []
        self._quiet = 0
        return candidates, chosen

    def took(self, rows: StepRows, seconds: float, *, began_ahead: bool) -> None:
        """Learn from the time between the records of a step without prompts and of the one before."""
        self._lengths.add(rows.tokens, seconds, drafted=bool(rows.drafting), began_ahead=began_ahead)


def drafting_of(rows: StepRows, result: StepResult) -> Drafting | None:
    """Return the counts of the drafts in a step; None without any."""
    if not (drafts := [row for _, row in rows.drafting]):
        return None
    counts = dict(zip(result.slots, result.token_counts, strict=True))
    accepted = sum(max(0, min(counts.get(row.sequence.slot, 0) - 1, len(row.drafts))) for row in drafts)
    return Drafting(len(drafts), sum(len(row.drafts) for row in drafts), accepted)
