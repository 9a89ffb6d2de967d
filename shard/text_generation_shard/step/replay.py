"""Replay: the generated tokens at the end of a sequence's prompt, each scored again from the logits and masks of its position."""

import math
from dataclasses import dataclass, field, replace

import numpy as np

from text_generation_proto.values import LogprobOptions
from text_generation_shard.engine import NewSequence, TokenScores
from text_generation_shard.step.masks import Mask, TokenMasks
from text_generation_shard.step.sequence import GREEDY, Sequence

UNKNOWN = Mask(np.zeros(0, dtype=np.bool_), may_end=False, failure="the grammar is not compiled yet")


@dataclass(slots=True)
class Replay:
    """Scores the generated tokens of a sequence, in order, while its prompt is computed."""

    tokens: list[int]
    """Prompt and generated tokens."""
    walker: Sequence
    """The sequence as it was when the next of these tokens was chosen."""
    constrained: bool
    """True if it has a grammar; the walker has the matcher once it is compiled."""
    scores: TokenScores
    _accepted: int = field(default=0)
    """Generated tokens that the matcher has taken."""

    @classmethod
    def begin(cls, new: NewSequence) -> Sequence:
        """Return the sequence that computes the prompt of a replay, with the replay."""
        count = new.generated_tokens
        plain = replace(new, logprobs=LogprobOptions(), generated_tokens=0)
        walker = Sequence.of(replace(plain, prompt=new.prompt[: len(new.prompt) - count], matcher=None))
        sequence = Sequence.of(replace(plain, sampling=GREEDY, grammar=None))
        scores = TokenScores(new.slot, [math.nan] * count, [0] * count, [math.nan] * count)
        sequence.replay = cls(list(new.prompt), walker, new.grammar is not None, scores)
        return sequence

    @property
    def first(self) -> int:
        """Position of the first generated token."""
        return self.walker.prompt_length

    def predicted(self, start: int, length: int) -> range:
        """Return the generated tokens that positions [start, start + length) predict; position i predicts token i + 1."""
        return range(max(start + 1, self.first), min(start + length + 1, len(self.tokens)))

    def mask(self, masks: TokenMasks | None) -> Mask | None:
        """Return the mask of the walker's next token; None without a grammar, one with a failure if it is not known."""
        if not self.constrained:
            return None
        walker, matcher = self.walker, self.walker.matcher
        if masks is None or matcher is None:
            return UNKNOWN
        for token in walker.tokens[self.first + self._accepted :]:
            matcher.beside = None  # the mask of the start, which is computed with the grammar
            matcher.accept(token)
        self._accepted = walker.generated
        return masks.now(walker, matcher)

    def advance(self) -> None:
        """Let the walker take its next token."""
        self.walker.tokens.append(self.tokens[len(self.walker.tokens)])
        self.walker.generated += 1
