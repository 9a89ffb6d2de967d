"""Log-probabilities of prompts: what the model gave each prompt token before it was told."""

from __future__ import annotations

import torch
from torch import Tensor

from text_generation_shard.engines.torch.batch import StepBatch
from text_generation_shard.engines.torch.model import Decoder
from text_generation_shard.sequences import Row

POSITIONS_AT_ONCE = 64
"""Positions whose logits are held at the same time: a whole prompt's would take gigabytes."""


def score_prompts(rows: list[Row], batch: StepBatch, hidden: Tensor, model: Decoder) -> None:
    """Fill in the prompt logprobs, and most probable tokens, that this step's `hidden` [tokens, hidden] tells, for the rows that ask.

    Position i predicts token i + 1. The logits are the model's own: no stage of sampling touches them.
    """
    for row, places in zip(rows, batch.offsets, strict=True):
        if row.sequence.prompt_scores is None:
            continue
        scores, tops = row.sequence.prompt_scores.logprobs, row.sequence.prompt_scores.tops
        for offset, span in places:
            for start in range(span.start, min(span.end, len(scores) - 1), POSITIONS_AT_ONCE):
                end = min(start + POSITIONS_AT_ONCE, span.end, len(scores) - 1)
                first = offset + start - span.start
                logprobs = model.logits(hidden[first : first + end - start]).float().log_softmax(-1)
                targets = torch.tensor(row.sequence.tokens[start + 1 : end + 1], device=hidden.device)
                scores[start + 1 : end + 1] = logprobs.gather(1, targets.unsqueeze(1)).squeeze(1).tolist()
                if tops is not None:
                    best = logprobs.topk(min(row.sequence.prompt_top_n, logprobs.shape[1]), dim=-1)
                    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                    tops[start + 1 : end + 1] = [(tuple(ids), tuple(values)) for ids, values in pairs]
