"""Prompt log-probabilities: the logprob of each prompt token given the tokens before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_shard.engine import PromptScores
from text_generation_shard.engines.torch.device.copies import download, upload
from text_generation_shard.step.sequence import Sequence, StepRow

POSITIONS_AT_ONCE = 64
"""Positions whose logits are held at once: the logits of a whole prompt would take gigabytes."""


@dataclass(frozen=True, slots=True)
class PendingScores:
    """Scores of the prompt tokens at positions [first, first + n), being copied to the host."""

    scores: PromptScores
    first: int
    logprobs: Tensor
    """[n]"""
    top_ids: Tensor
    """[n, number of top tokens]; `top_logprobs` likewise."""
    top_logprobs: Tensor

    def finish(self) -> None:
        """Write the scores to `scores`; the device must have finished the copies."""
        span = slice(self.first, self.first + len(self.logprobs))
        self.scores.logprobs[span] = self.logprobs.tolist()
        if self.scores.tops is not None:
            pairs = zip(self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True)
            self.scores.tops[span] = [(tuple(ids), tuple(logprobs)) for ids, logprobs in pairs]


def start_scores(
    row: StepRow, scores: PromptScores, offset: int, hidden: Tensor, logits: Callable[[Tensor, int, int], Tensor]
) -> list[PendingScores]:
    """Launch the scoring of the prompt tokens that a row's hidden states predict; `offset` as in `Launched.prefills`.

    `logits(hidden, first, end)` returns the logits of rows first <= row < end of the hidden states, without any sampling
    transformation. Position i predicts token i + 1.
    """
    pending: list[PendingScores] = []
    last = min(row.start + row.length, len(scores.logprobs) - 1)
    for start in range(row.start, last, POSITIONS_AT_ONCE):
        end = min(start + POSITIONS_AT_ONCE, last)
        predicting = logits(hidden, offset + start - row.start, offset + end - row.start)
        pending.append(_start(row.sequence, scores, start + 1, predicting))
    return pending


def _start(sequence: Sequence, scores: PromptScores, first: int, logits: Tensor) -> PendingScores:
    """Score the tokens that `logits` [n, vocabulary] predict; `first` is the position of the first of them."""
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
