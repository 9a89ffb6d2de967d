"""Drafts of any tokens that are taken as right at a given rate: for measurements of speed alone, since the texts are not the model's."""

import random

from text_generation_proto.values import EAGLE, MTP, SYNTHETIC
from text_generation_shard.step.drafts.length import Acceptance
from text_generation_shard.step.sequence import Draft, SamplerOutput, Sequence, StepRows

STEPS_OF_BISECTION = 40


class SyntheticDrafts:
    """A source of drafts of `most` tokens; a step that verifies them all yields `tokens` tokens on average."""

    def __init__(self, acceptance: Acceptance, most: int, tokens: float, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._draw = random.Random(0)
        self.right = probability_of(tokens, most)
        # Known as that of a lookup is, which learns it without drafting, too.
        for source in (SYNTHETIC, MTP, EAGLE):
            acceptance.know(source, self.right)

    def forget_ended(self) -> None:
        """Do nothing: sequences have no state."""

    def drafts(self, sequence: Sequence, most: int) -> Draft | None:
        """Return `most` tokens that differ, as those of a text do: a mixture of experts needs no fewer of its experts."""
        first = len(sequence.tokens) * 7919 + sequence.slot
        tokens = tuple((first + place) * 2654435761 % self._vocab_size for place in range(most))
        return Draft(tokens, SYNTHETIC, 0) if tokens else None

    def judge(self, rows: StepRows, output: SamplerOutput) -> None:
        """Replace the sampled tokens of rows with drafts by those that were drafted, as far as these count as right."""
        for first, row in rows.drafting:
            for place, draft in enumerate(row.drafts):
                if self._draw.random() >= self.right:
                    output.token_ids[first + place] += output.token_ids[first + place] == draft
                    output.token_ids[first + place] %= self._vocab_size
                    break
                output.token_ids[first + place] = draft


def probability_of(tokens: float, most: int) -> float:
    """Return the probability p of each token, if the ones before it are right, with 1 + p + … + p^most = tokens."""
    low, high = 0.0, 1.0
    for _ in range(STEPS_OF_BISECTION):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**place for place in range(most + 1)) < tokens else (low, middle)
    return low
