"""From logits to tokens, for all rows of a step at once; pure on tensors.

The stages and their order are TGI's (its `logits_process.py`): watermark, repetition penalty, frequency penalty,
then what OpenAI's clients ask for and what may be chosen at all (`penalties`), temperature, top-k, top-p, min-p,
typical-p, choice. Each touches only the rows that ask for it. A row reads nothing of its neighbours: its penalties count
over its own tokens, its watermark hangs on its own last token, and its draw on its own (seed, position).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_shard.penalties import adjust
from text_generation_shard.sampling_rows import SamplingRow

CANDIDATES = (256, 4096)
"""How many of the largest keys are sorted before all are: most sets of a given mass are far smaller."""
SEGMENT = 1024
"""Tokens that a search of the vocabulary takes as one before it looks closer."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What each row chose."""

    token_ids: list[int]
    logprobs: list[float]
    """Of the chosen tokens: log_softmax of the processed logits."""
    valid: list[bool]
    """False where the logits held NaN or +inf, or no finite choice was left."""
    scores: Tensor
    """[rows, vocabulary] processed logits, float32."""
    normalizers: Tensor
    """[rows] logsumexp of the scores."""


def choose(logits: Tensor, rows: Sequence[SamplingRow]) -> Choices:
    """One token for each of `rows` from `logits` [rows, vocabulary]."""
    padded = _segmented(logits)
    scores = padded[:, : logits.shape[1]]
    _process(scores, rows)
    probabilities = padded.softmax(-1)
    token_ids = _argmax(padded)
    drawing = [i for i, row in enumerate(rows) if not row.sampling.greedy]
    if drawing:
        part = probabilities if len(drawing) == len(rows) else probabilities[drawing]
        uniforms = [uniform(rows[i].sampling.seed, rows[i].position) for i in drawing]
        token_ids[drawing] = _draw(part, torch.tensor(uniforms, dtype=torch.float64, device=scores.device))
    chosen = token_ids.unsqueeze(1)
    chosen_scores = scores.gather(1, chosen).squeeze(1)
    normalizers = chosen_scores - probabilities.gather(1, chosen).squeeze(1).log_()
    # The subtraction that `top_tokens` does, so that a token has one log-probability wherever it is told.
    logprobs = chosen_scores - normalizers
    return Choices(
        token_ids=token_ids.tolist(),
        logprobs=logprobs.tolist(),
        valid=logprobs.isfinite().tolist(),
        scores=scores,
        normalizers=normalizers,
    )


def _segmented(logits: Tensor) -> Tensor:
    """A float32 copy, padded with −inf to whole segments."""
    rows, vocabulary = logits.shape
    padded = logits.new_empty(rows, -(-vocabulary // SEGMENT) * SEGMENT, dtype=torch.float32)
    padded[:, :vocabulary] = logits
    padded[:, vocabulary:] = -torch.inf
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


def top_tokens(choices: Choices, row: int, n: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Ids and logprobs of a row's n most probable tokens, best first: more on a tie at the nth, none of probability 0."""
    scores = choices.scores[row]
    nth = scores.topk(min(n, scores.numel())).values[-1]
    ids = ((scores >= nth) & (scores > -torch.inf)).nonzero().squeeze(1)
    values, order = scores[ids].sort(descending=True, stable=True)
    return tuple(ids[order].tolist()), tuple((values - choices.normalizers[row]).tolist())


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that hangs on (seed, position) alone: splitmix64 (Steele et al. 2014) of both."""
    return (_splitmix64(_splitmix64(seed) ^ position) >> 11) * 2.0**-53


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


def _process(scores: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Run every stage, in place, over the rows that ask for it."""
    adjust(scores, rows)
    samplings = [row.sampling for row in rows]
    vocabulary = scores.shape[1]
    _stage(scores, [s.temperature if s.temperature != 1.0 else None for s in samplings], _heat)
    _stage(scores, [float(min(s.top_k, vocabulary)) if s.top_k else None for s in samplings], _top_k)
    _stage(scores, [s.top_p if s.top_p < 1.0 else None for s in samplings], _top_p)
    _stage(scores, [math.log(s.min_p) if s.min_p else None for s in samplings], _min_p)
    _stage(scores, [s.typical_p if s.typical_p < 1.0 else None for s in samplings], _typical_p)


def _stage(scores: Tensor, values: list[float | None], run: Callable[[Tensor, Tensor], None]) -> None:
    """Run a stage, in place, over the rows whose value is not None; it is handed those rows and values [rows, 1]."""
    asking = [i for i, value in enumerate(values) if value is not None]
    if not asking:
        return
    column = torch.tensor([value for value in values if value is not None], dtype=torch.float64, device=scores.device)
    if len(asking) == len(values):
        run(scores, column.unsqueeze(1))
    else:
        part = scores[asking]
        run(part, column.unsqueeze(1))
        scores[asking] = part


def _heat(scores: Tensor, temperature: Tensor) -> None:
    scores.div_(temperature.float())


def _top_k(scores: Tensor, k: Tensor) -> None:
    """Drop what is below the kth largest; ties with it stay."""
    counts = k.long()
    largest = scores.topk(int(counts.max()), dim=-1).values
    scores.masked_fill_(scores < largest.gather(1, counts - 1), -torch.inf)


def _top_p(scores: Tensor, p: Tensor) -> None:
    """Keep the smallest set of most probable tokens whose mass reaches p, and ties (Holtzman et al. 2020)."""
    threshold = _smallest_set(scores, scores.softmax(-1), p)
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
    threshold = _smallest_set(nearness, probabilities, p)
    scores.masked_fill_(nearness < threshold, -torch.inf)


def _smallest_set(keys: Tensor, probabilities: Tensor, mass: Tensor) -> Tensor:
    """The least key [rows, 1] among the fewest tokens of largest key whose probabilities reach `mass`; at least one token.

    A token belongs to the set as long as those before it fall short of the mass.
    """
    thresholds = torch.empty_like(keys[:, :1])
    open_rows = torch.arange(keys.shape[0], device=keys.device)
    vocabulary = keys.shape[1]
    for count in (*CANDIDATES, vocabulary):
        largest = keys[open_rows].topk(min(count, vocabulary), dim=-1)
        ordered = probabilities[open_rows].gather(1, largest.indices).double()
        before = ordered.cumsum(-1) - ordered
        kept = (before < mass[open_rows]).sum(-1, keepdim=True).clamp_(min=1)
        thresholds[open_rows] = largest.values.gather(1, kept - 1)
        # All candidates kept: the set may go on beyond them.
        open_rows = open_rows[kept.squeeze(1) == count]
        if count >= vocabulary or not open_rows.numel():
            break
    return thresholds


def _draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens [rows] by inverse transform sampling: where the cumulative distribution passes `uniforms` [rows].

    Sums whole segments first and looks closer only in the one that is hit: a running sum over the vocabulary in float64
    takes many times as long.
    """
    parts = probabilities.view(probabilities.shape[0], -1, SEGMENT)
    sums = parts.sum(-1, dtype=torch.float64).cumsum(-1)
    wanted = (uniforms * sums[:, -1]).unsqueeze(1)
    segment = torch.searchsorted(sums, wanted, right=True).clamp_(max=parts.shape[1] - 1)
    rest = wanted - torch.where(segment > 0, sums.gather(1, (segment - 1).clamp(min=0)), 0.0)
    inside = _segment(parts, segment)
    place = torch.searchsorted(inside.cumsum(-1, dtype=torch.float64), rest, right=True)
    # The two sums may round apart: never past the last token with a probability.
    last = torch.where(inside > 0, torch.arange(SEGMENT, device=inside.device), 0).amax(-1, keepdim=True)
    return (segment * SEGMENT + torch.minimum(place, last)).squeeze(1)
