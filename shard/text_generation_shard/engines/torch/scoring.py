"""Log-probabilities of prompts: what the model gave each prompt token before it was told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_shard.engine import PromptScores
from text_generation_shard.engines.torch.executor import Launched
from text_generation_shard.engines.torch.upload import download, upload
from text_generation_shard.step.sequence import Sequence

POSITIONS_AT_ONCE = 64
"""Positions whose logits are held at the same time: a whole prompt's would take gigabytes."""


@dataclass(frozen=True, slots=True)
class PendingScores:
    """Scores of the prompt tokens at positions [first, first + n), on their way to the host."""

    scores: PromptScores
    first: int
    logprobs: Tensor
    """[n]"""
    top_ids: Tensor
    """[n, most probable tokens wanted]; likewise `top_logprobs`."""
    top_logprobs: Tensor

    def finish(self) -> None:
        """Fill them in; the device must be past the start of these."""
        places = slice(self.first, self.first + len(self.logprobs))
        self.scores.logprobs[places] = self.logprobs.tolist()
        if self.scores.tops is not None:
            pairs = zip(self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True)
            self.scores.tops[places] = [(tuple(ids), tuple(logprobs)) for ids, logprobs in pairs]


def start_scores(launched: Launched, logits: Callable[[Tensor, int, int], Tensor]) -> list[PendingScores]:
    """Launch the scoring of what prompt tokens a step's hidden states predict, for the rows that ask.

    `logits` gives those of rows first <= row < end of the hidden states. They are the model's own: no stage of sampling touches them. Position i
    predicts token i + 1.
    """
    pending: list[PendingScores] = []
    for row, places in launched.places:
        scores = row.sequence.prompt_scores
        if scores is None:
            continue
        for offset, first, length in places:
            last = min(first + length, len(scores.logprobs) - 1)
            for start in range(first, last, POSITIONS_AT_ONCE):
                end = min(start + POSITIONS_AT_ONCE, last)
                predicting = logits(launched.hidden, offset + start - first, offset + end - first)
                pending.append(_start(row.sequence, scores, start + 1, predicting))
    return pending


def _start(sequence: Sequence, scores: PromptScores, first: int, logits: Tensor) -> PendingScores:
    """Score the tokens that `logits` [n, vocabulary] predict, the first of which is at position `first`."""
    logprobs = logits.float().log_softmax(-1)
    targets = upload(sequence.tokens[first : first + len(logits)], torch.int64, logits.device)
    count = 0 if scores.tops is None else min(sequence.prompt_top_n, logits.shape[1])
    best = logprobs.topk(count, dim=-1)
    return PendingScores(
        scores=scores,
        first=first,
        logprobs=download(logprobs.gather(1, targets.unsqueeze(1)).squeeze(1)),
        top_ids=download(best.indices),
        top_logprobs=download(best.values),
    )
