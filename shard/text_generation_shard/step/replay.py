"""Replay: the generated tokens at the end of a sequence's prompt, each scored again from the logits and masks of its position."""

import math
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, replace

from text_generation_proto.values import LogprobOptions
from text_generation_shard.engine import NewSequence, TokenScores
from text_generation_shard.step.masks import Mask, TokenMasks
from text_generation_shard.step.sequence import GREEDY, Sequence


@dataclass(slots=True)
class Replay:
    """Scores the generated tokens of a sequence, in order, while its prompt is computed."""

    tokens: Sequences[int]
    """Prompt and generated tokens."""
    walker: Sequence
    """The sequence as it was when the next of these tokens was chosen. With a grammar, it has the matcher before the first."""
    scores: TokenScores

    @classmethod
    def begin(cls, new: NewSequence) -> Sequence:
        """Return the sequence that computes the prompt of a replay, with the replay."""
        count = new.generated_tokens
        plain = replace(new, logprobs=LogprobOptions(), generated_tokens=0)
        walker = Sequence.of(replace(plain, prompt=new.prompt[: len(new.prompt) - count], matcher=None))
        sequence = Sequence.of(replace(plain, sampling=GREEDY, grammar=None))
        scores = TokenScores(new.slot, [math.nan] * count, [0] * count, [math.nan] * count)
        sequence.replay = cls(new.prompt, walker, scores)
        return sequence

    def predicted(self, start: int, length: int) -> range:
        """Return the generated tokens that positions [start, start + length) predict; position i predicts token i + 1."""
        return range(max(start + 1, self.walker.prompt_length), min(start + length + 1, len(self.tokens)))

    def mask(self, masks: TokenMasks | None) -> Mask | None:
        """Return the mask of the walker's next token; None without a grammar."""
        matcher = self.walker.matcher
        return None if masks is None or matcher is None else masks.now(self.walker, matcher)

    def advance(self) -> None:
        """Let the walker take its next token."""
        walker = self.walker
        walker.tokens.append(self.tokens[len(walker.tokens)])
        walker.generated += 1
        if walker.matcher is not None:
            walker.matcher.accept(walker.tokens[-1])

    def write(self, position: int, logprob: float, drawn: int, drawn_logprob: float) -> None:
        """Write the scores of the token at a position."""
        at, scores = position - self.walker.prompt_length, self.scores
        scores.logprobs[at], scores.drawn_ids[at], scores.drawn_logprobs[at] = logprob, drawn, drawn_logprob
