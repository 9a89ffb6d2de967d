"""From logits to tokens, for all rows of a step at once; pure on tensors.

The stages and their order are TGI's (its `logits_process.py`): watermark, repetition penalty, frequency penalty,
then what OpenAI's clients ask for and what may be chosen at all (`penalties`), temperature, top-k, top-p, min-p,
typical-p, choice. Each touches only the rows that ask for it. A row reads nothing of its neighbours: its penalties count
over its own tokens, its watermark hangs on its own last token, and its draw on its own (seed, position).

On a GPU all of it is launched and nothing waited for: no number comes back before somebody reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from text_generation_proto.values import Sampling
from text_generation_shard.engines.torch.sampling.penalties import adjust
from text_generation_shard.engines.torch.sampling.row_columns import Column, send
from text_generation_shard.engines.torch.sampling.rows import SamplingRow
from text_generation_shard.engines.torch.sampling.thresholds import kth_largest, smallest_set

SEGMENT = 1024
"""Tokens that a search of the vocabulary takes as one before it looks closer."""

Stage = Callable[[Tensor, Tensor], None]
"""Changes scores [rows, vocabulary] in place, given a number [rows, 1] for each row, float64."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What each row chose, on the device, which may not have come to it yet."""

    token_ids: Tensor
    """[rows] int64; within the vocabulary even where the choice is not valid."""
    logprobs: Tensor
    """[rows] float32, of the chosen tokens: log_softmax of the processed logits.

    Not finite where the choice is not valid: the logits held NaN or +inf, or no finite choice was left.
    """
    scores: Tensor
    """[rows, vocabulary] processed logits, float32."""
    normalizers: Tensor
    """[rows] logsumexp of the scores."""


def choose(logits: Tensor, rows: Sequence[SamplingRow]) -> Choices:
    """One token for each of `rows` from `logits` [rows, vocabulary], which stay as they are."""
    padded = _segmented(logits)
    scores = padded[:, : logits.shape[1]]
    adjust(scores, rows)
    stages = _stages([row.sampling for row in rows], logits.shape[1])
    drawing = [index for index, row in enumerate(rows) if not row.sampling.greedy]
    columns = [column for _, column in stages]
    if drawing:
        columns.append(Column(drawing, uniforms([rows[index] for index in drawing])))
    sent = send(columns, len(rows), scores.device)
    for (run, _), column in zip(stages, sent, strict=False):
        part = column.part(scores)
        run(part, column.numbers)
        column.replaced(scores, part)
    probabilities = padded.softmax(-1)
    token_ids = _argmax(padded)
    if drawing:
        asking = sent[-1]
        token_ids = asking.replaced(token_ids, _draw(asking.part(probabilities), asking.numbers))
    chosen = token_ids.unsqueeze(1)
    chosen_scores = scores.gather(1, chosen).squeeze(1)
    normalizers = chosen_scores - probabilities.gather(1, chosen).squeeze(1).log_()
    # The subtraction that `top_candidates` does, so that a token has one log-probability wherever it is told.
    return Choices(token_ids, chosen_scores - normalizers, scores, normalizers)


def _segmented(logits: Tensor) -> Tensor:
    """A float32 copy, padded with −inf to whole segments."""
    rows, vocabulary = logits.shape
    padded = logits.new_empty(rows, -(-vocabulary // SEGMENT) * SEGMENT, dtype=torch.float32)
    padded[:, :vocabulary] = logits
    padded[:, vocabulary:].fill_(-torch.inf)
    return padded


def _argmax(padded: Tensor) -> Tensor:
    """Tokens [rows] of the largest score, the first on a tie: the best segment, then the best in it.

    Maxima run at the speed of memory, torch's argmax on CPU at a fifth of it.
    """
    parts = padded.view(padded.shape[0], -1, SEGMENT)
    segment = parts.amax(-1).argmax(-1, keepdim=True)
    tokens = segment * SEGMENT + _segment(parts, segment).argmax(-1, keepdim=True)
    return tokens.squeeze(1)


def _segment(parts: Tensor, segment: Tensor) -> Tensor:
    """[rows, SEGMENT]: of `parts` [rows, segments, SEGMENT] each row's own `segment` [rows, 1]."""
    return parts.gather(1, segment.unsqueeze(2).expand(-1, -1, SEGMENT)).squeeze(1)


def uniforms(rows: Sequence[SamplingRow]) -> list[float]:
    """For each row a number in [0, 1) that hangs on its (seed, position) alone: splitmix64 (Steele et al. 2014) of both."""
    seeds = np.array([row.sampling.seed for row in rows], dtype=np.uint64)
    mixed = _splitmix64(_splitmix64(seeds) ^ np.array([row.position for row in rows], dtype=np.uint64))
    numbers: list[float] = ((mixed >> np.uint64(11)) * 2.0**-53).tolist()
    return numbers


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _stages(samplings: Sequence[Sampling], vocabulary: int) -> list[tuple[Stage, Column]]:
    """The stages that some row asks for, in order, and for each of those rows the number it asks with."""
    stages: list[tuple[Stage, Column]] = []
    if asking := [i for i, s in enumerate(samplings) if s.temperature != 1.0]:
        stages.append((_heat, Column(asking, [samplings[i].temperature for i in asking])))
    if asking := [i for i, s in enumerate(samplings) if s.top_k]:
        stages.append((_top_k, Column(asking, [min(samplings[i].top_k, vocabulary) for i in asking])))
    if asking := [i for i, s in enumerate(samplings) if s.top_p < 1.0]:
        stages.append((_top_p, Column(asking, [samplings[i].top_p for i in asking])))
    if asking := [i for i, s in enumerate(samplings) if s.min_p]:
        stages.append((_min_p, Column(asking, [math.log(samplings[i].min_p) for i in asking])))
    if asking := [i for i, s in enumerate(samplings) if s.typical_p < 1.0]:
        stages.append((_typical_p, Column(asking, [samplings[i].typical_p for i in asking])))
    return stages


def _heat(scores: Tensor, temperature: Tensor) -> None:
    scores.div_(temperature.float())


def _top_k(scores: Tensor, k: Tensor) -> None:
    """Drop what is below the kth largest; ties with it stay."""
    scores.masked_fill_(scores < kth_largest(scores, k), -torch.inf)


def _top_p(scores: Tensor, p: Tensor) -> None:
    """Keep the smallest set of most probable tokens whose mass reaches p, and ties (Holtzman et al. 2020)."""
    threshold = smallest_set(scores, scores.softmax(-1), p)
    scores.masked_fill_(scores < threshold, -torch.inf)


def _min_p(scores: Tensor, log_p: Tensor) -> None:
    """Drop what is less than p times as probable as the most probable token (Nguyen et al. 2024)."""
    threshold = scores.amax(-1, keepdim=True) + log_p.float()
    scores.masked_fill_(scores < threshold, -torch.inf)


def _typical_p(scores: Tensor, p: Tensor) -> None:
    """Keep the smallest set, of those nearest to the entropy, whose mass reaches p, and ties (Meister et al. 2023)."""
    logprobs = scores.log_softmax(-1)
    probabilities = logprobs.exp()
    entropy = -(probabilities * logprobs).nansum(-1, keepdim=True)
    nearness = -(-logprobs - entropy).abs_()
    threshold = smallest_set(nearness, probabilities, p)
    scores.masked_fill_(nearness < threshold, -torch.inf)


def _draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Tokens [rows] by inverse transform sampling: where the cumulative distribution passes `uniform` [rows, 1].

    Sums whole segments first and looks closer only in the one that is hit: a running sum over the vocabulary in float64
    takes many times as long.
    """
    parts = probabilities.view(probabilities.shape[0], -1, SEGMENT)
    sums = parts.sum(-1, dtype=torch.float64).cumsum(-1)
    wanted = uniform * sums[:, -1:]
    segment = torch.searchsorted(sums, wanted, right=True).clamp_(max=parts.shape[1] - 1)
    rest = wanted - sums.gather(1, (segment - 1).clamp(min=0)).masked_fill_(segment == 0, 0.0)
    inside = _segment(parts, segment)
    place = torch.searchsorted(inside.cumsum(-1, dtype=torch.float64), rest, right=True)
    # The two sums may round apart: never past the last token with a probability.
    last = ((inside > 0) * torch.arange(SEGMENT, device=inside.device)).amax(-1, keepdim=True)
    return (segment * SEGMENT + torch.minimum(place, last)).squeeze(1)
