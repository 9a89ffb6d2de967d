"""From logits to tokens, for all rows of a step at once; pure functions of tensors.

The stages and their order are TGI's (its `logits_process.py`): watermark, repetition penalty, frequency penalty, then
OpenAI's parameters and the masks (`penalties`), temperature, top-k, top-p, min-p, typical-p, choice. Each stage runs only on
the rows that use it. Rows are independent: penalties count a row's own tokens, the watermark depends on its own last token,
the draw on its own (seed, position).

On a GPU everything is launched and nothing waited for: no value is copied back before it is read.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from text_generation_proto.values import Sampling
from text_generation_shard.engines.torch.device.copies import download, upload
from text_generation_shard.engines.torch.sampling.penalties import SamplingRow, apply_penalties

CANDIDATES = (256, 4096)
"""Numbers of largest keys to sort before all are sorted: most sets of a given mass are far smaller."""
SEGMENT = 1024
"""Tokens that a search of the vocabulary first treats as one unit."""
TIES = 16
"""Extra candidates fetched per row on a GPU, in case they tie with the last one requested."""
_GOLDEN, _SHIFTS, _FACTORS = 0x9E3779B97F4A7C15, (30, 27, 31), (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Constants of splitmix64: the increment; shifts and factors of its rounds."""

Stage = Callable[[Tensor, Tensor], None]
"""Changes scores [rows, vocabulary] in place, given one parameter [rows, 1] float64 for each row."""


@dataclass(frozen=True, slots=True)
class ThresholdSearch:
    """Searches, on one kind of device, for the smallest key in a set of a row's largest keys, given by its weight or its size."""

    smallest_set: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(keys, weights, mass) → threshold; see `smallest_set`."""
    kth_largest: Callable[[Tensor, Tensor], Tensor]
    """(keys, k) → threshold; see `kth_largest`."""
    rows_at_once: int = 1 << 30
    """Rows that a stage computes at once: bounds its memory."""


def smallest_set(keys: Tensor, weights: Tensor, mass: Tensor) -> Tensor:
    """Return the smallest key [rows, 1] of the smallest set of largest keys whose weights reach `mass` [rows, 1].

    `keys` and `weights` are [rows, n] float32. A key belongs to the set if the weights before it fall short of the mass. If all
    weights fall short, the result is the smallest key of the row.
    """
    thresholds = torch.empty_like(keys[:, :1])
    open_rows = torch.arange(keys.shape[0])
    n = keys.shape[1]
    for count in (*CANDIDATES, n):
        largest = keys[open_rows].topk(min(count, n), dim=-1)
        ordered = weights[open_rows].gather(1, largest.indices).double()
        before = ordered.cumsum(-1) - ordered
        kept = (before < mass[open_rows]).sum(-1, keepdim=True).clamp_(min=1)
        thresholds[open_rows] = largest.values.gather(1, kept - 1)
        # If all candidates are kept, the set may be larger.
        open_rows = open_rows[kept.squeeze(1) == count]
        if count >= n or not open_rows.numel():
            break
    return thresholds


def kth_largest(keys: Tensor, k: Tensor) -> Tensor:
    """Return the kth largest key [rows, 1] of `keys` [rows, n] float32; `k` [rows, 1] is in 1 … n."""
    indices = k.long() - 1
    return keys.topk(int(indices.max()) + 1, dim=-1).values.gather(1, indices)


SORTING = ThresholdSearch(smallest_set, kth_largest, rows_at_once=32)
"""Sorts as many of the largest keys as needed; it suits a CPU."""


@dataclass(frozen=True, slots=True)
class SampledTensors:
    """The tokens that a step sampled, on the device; the computation may still be running."""

    token_ids: Tensor
    """[rows] int64; within the vocabulary even if the choice is invalid."""
    logprobs: Tensor
    """[rows] float32, of the chosen tokens: log_softmax of the processed logits.

    Not finite if the choice is invalid: the logits held NaN or +inf, or no finite choice was left.
    """
    scores: Tensor
    """[rows, vocabulary] processed logits, float32."""
    normalizers: Tensor
    """[rows] logsumexp of the scores."""


def sample(logits: Tensor, rows: Sequence[SamplingRow], search: ThresholdSearch = SORTING) -> SampledTensors:
    """Choose a token for each of `rows` from `logits` [rows, vocabulary], which stay unchanged."""
    padded = _pad_to_segments(logits)
    scores = padded[:, : logits.shape[1]]
    apply_penalties(scores, rows)
    stages = _stages([row.sampling for row in rows], logits.shape[1], search)
    drawing = [index for index, row in enumerate(rows) if not row.sampling.greedy]
    columns = [column for _, column in stages]
    if drawing:
        columns.append(_Column(drawing, draw_keys([rows[index] for index in drawing])))
    sent = _send(columns, len(rows), scores.device)
    for (run, _), column in zip(stages, sent, strict=False):
        for some in column.split(search.rows_at_once):
            part = some.select(scores)
            run(part, some.values)
            some.merge(scores, part)
    probabilities = padded.softmax(-1)
    token_ids = _argmax(padded)
    if drawing:
        draws = sent[-1]
        token_ids = draws.merge(token_ids, _draw(draws.select(probabilities), draws.values))
    chosen = token_ids.unsqueeze(1)
    chosen_scores = scores.gather(1, chosen).squeeze(1)
    normalizers = chosen_scores - probabilities.gather(1, chosen).squeeze(1).log_()
    # The same subtraction as in `top_candidates`, so that a token has one log-probability everywhere.
    return SampledTensors(token_ids, chosen_scores - normalizers, scores, normalizers)


def draw_keys(rows: Sequence[SamplingRow]) -> list[float]:
    """Return a number of 53 bits per row, a hash of its (seed, position): splitmix64 (Steele et al. 2014) of both."""
    seeds = np.array([row.sampling.seed for row in rows], dtype=np.uint64)
    mixed = _splitmix64(_splitmix64(seeds) ^ np.array([row.position for row in rows], dtype=np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64).tolist()  # type: ignore[no-any-return]


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(_GOLDEN)
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(_SHIFTS[-1]))


# ---------------------------------------------------------------------------------------------------------- parameters


@dataclass(frozen=True, slots=True)
class _Column:
    """On the host: the rows that use a stage, and its parameter for each."""

    rows: list[int]
    values: list[float]


@dataclass(frozen=True, slots=True)
class _DeviceColumn:
    """A `_Column` on the device."""

    rows: Tensor | None
    """[used] int64; None for all rows."""
    values: Tensor
    """[used, 1] float64."""

    def split(self, rows_at_once: int) -> "list[_DeviceColumn]":
        """Return columns of at most that number of rows."""
        count = len(self.values)
        if count <= rows_at_once:
            return [self]
        rows = torch.arange(count, device=self.values.device) if self.rows is None else self.rows
        parts = zip(torch.split(rows, rows_at_once), torch.split(self.values, rows_at_once), strict=True)
        return [_DeviceColumn(some, values) for some, values in parts]

    def select(self, tensor: Tensor) -> Tensor:
        """Return the rows of `tensor` [rows, …] in use: a copy, or the tensor itself for all rows."""
        return tensor if self.rows is None else tensor.index_select(0, self.rows)

    def merge(self, tensor: Tensor, part: Tensor) -> Tensor:
        """Return `tensor` [rows, …] with `part` for the rows in use; may change it in place."""
        return part if self.rows is None else tensor.index_copy_(0, self.rows, part)


def _send(columns: Sequence[_Column], num_rows: int, device: torch.device) -> "list[_DeviceColumn]":
    """Copy the columns of a step of `num_rows` rows to the device, in two copies at most. None may be empty."""
    if not columns:
        return []
    values = upload([value for column in columns for value in column.values], torch.float64, device).unsqueeze(1)
    partial_rows = [row for column in columns if len(column.rows) < num_rows for row in column.rows]
    rows = upload(partial_rows, torch.int64, device) if partial_rows else None
    sent: list[_DeviceColumn] = []
    first = first_row = 0
    for column in columns:
        count = len(column.rows)
        index: Tensor | None = None
        if rows is not None and count < num_rows:
            index = rows[first_row : first_row + count]
            first_row += count
        sent.append(_DeviceColumn(index, values[first : first + count]))
        first += count
    return sent


# -------------------------------------------------------------------------------------------------------------- stages


def _stages(samplings: Sequence[Sampling], vocabulary: int, search: ThresholdSearch) -> list[tuple[Stage, _Column]]:
    """Return the stages that some row uses, in order, each with its parameters."""
    stages: list[tuple[Stage, _Column]] = []
    if rows := [i for i, s in enumerate(samplings) if s.temperature != 1.0]:
        stages.append((_temperature, _Column(rows, [samplings[i].temperature for i in rows])))
    if rows := [i for i, s in enumerate(samplings) if s.top_k]:
        stages.append((partial(_top_k, search), _Column(rows, [min(samplings[i].top_k, vocabulary) for i in rows])))
    if rows := [i for i, s in enumerate(samplings) if s.top_p < 1.0]:
        stages.append((partial(_top_p, search), _Column(rows, [samplings[i].top_p for i in rows])))
    if rows := [i for i, s in enumerate(samplings) if s.min_p]:
        stages.append((_min_p, _Column(rows, [math.log(samplings[i].min_p) for i in rows])))
    if rows := [i for i, s in enumerate(samplings) if s.typical_p < 1.0]:
        stages.append((partial(_typical_p, search), _Column(rows, [samplings[i].typical_p for i in rows])))
    return stages


def _temperature(scores: Tensor, temperature: Tensor) -> None:
    scores.div_(temperature.float())


def _top_k(search: ThresholdSearch, scores: Tensor, k: Tensor) -> None:
    """Drop tokens below the kth largest; ties with it stay."""
    scores.masked_fill_(scores < search.kth_largest(scores, k), -torch.inf)


def _top_p(search: ThresholdSearch, scores: Tensor, p: Tensor) -> None:
    """Keep the smallest set of most probable tokens whose mass reaches p, and ties (Holtzman et al. 2020)."""
    threshold = search.smallest_set(scores, scores.softmax(-1), p)
    scores.masked_fill_(scores < threshold, -torch.inf)


def _min_p(scores: Tensor, log_p: Tensor) -> None:
    """Drop tokens less than p times as probable as the most probable one (Nguyen et al. 2024)."""
    threshold = scores.amax(-1, keepdim=True) + log_p.float()
    scores.masked_fill_(scores < threshold, -torch.inf)


def _typical_p(search: ThresholdSearch, scores: Tensor, p: Tensor) -> None:
    """Keep the smallest set of tokens nearest to the entropy whose mass reaches p, and ties (Meister et al. 2023)."""
    logprobs = scores.log_softmax(-1)
    probabilities = logprobs.exp()
    entropy = -(probabilities * logprobs).nansum(-1, keepdim=True)
    nearness = -(-logprobs - entropy).abs_()
    threshold = search.smallest_set(nearness, probabilities, p)
    scores.masked_fill_(nearness < threshold, -torch.inf)


# -------------------------------------------------------------------------------------------------------------- choice


def _pad_to_segments(logits: Tensor) -> Tensor:
    """Return a float32 copy, padded with −inf to whole segments."""
    rows, vocabulary = logits.shape
    padded = logits.new_empty(rows, -(-vocabulary // SEGMENT) * SEGMENT, dtype=torch.float32)
    padded[:, :vocabulary] = logits
    padded[:, vocabulary:].fill_(-torch.inf)
    return padded


def _argmax(padded: Tensor) -> Tensor:
    """Return the token [rows] of the largest score, the first on a tie: the best segment, then the best in it.

    Maxima run at memory speed, torch's argmax on CPU at a fifth of it.
    """
    parts = padded.view(padded.shape[0], -1, SEGMENT)
    segment = parts.amax(-1).argmax(-1, keepdim=True)
    tokens = segment * SEGMENT + _segment(parts, segment).argmax(-1, keepdim=True)
    return tokens.squeeze(1)


def _segment(parts: Tensor, segment: Tensor) -> Tensor:
    """Return [rows, SEGMENT]: each row's own `segment` [rows, 1] of `parts` [rows, segments, SEGMENT]."""
    return parts.gather(1, segment.unsqueeze(2).expand(-1, -1, SEGMENT)).squeeze(1)


def _draw(probabilities: Tensor, key: Tensor) -> Tensor:
    """Return tokens [rows]: a race of segments, then of the tokens in the one that wins. `key` [rows, 1] gives the times.

    A runner with probability p arrives after −log(u) / p, u uniform in (0, 1), so it is the first one with probability p. A rounding
    error ε of the probabilities changes about one token in 1/ε. With inverse transform sampling each border between two of the
    vocabulary's tokens would add to that: texts would depend on the batch and on drafts.
    """
    parts = probabilities.view(probabilities.shape[0], -1, SEGMENT)
    logs = _log_uniforms(key, parts.shape[1] + SEGMENT)
    segment = (parts.sum(-1, dtype=torch.float64) / logs[:, : parts.shape[1]]).argmin(-1, keepdim=True)
    tokens = segment * SEGMENT + (_segment(parts, segment) / logs[:, parts.shape[1] :]).argmin(-1, keepdim=True)
    return tokens.squeeze(1)


def _log_uniforms(key: Tensor, count: int) -> Tensor:
    """Return logarithms of numbers in (0, 1), float64 [rows, count]: `count` outputs of the generator splitmix64 for each key.

    Its shifts are arithmetic here and leave the sign bit 0; the 52 bits below it are used.
    """
    x = key.long() + torch.arange(1, count + 1, device=key.device) * (_GOLDEN - (1 << 64))
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        x ^= x >> shift
        x *= factor - (1 << 64)
    x ^= x >> _SHIFTS[-1]
    return (x >> 11).double().add_(0.5).mul_(2.0**-52).log_()


# ------------------------------------------------------------------------------------------------------ top candidates


@dataclass(frozen=True, slots=True)
class TopCandidates:
    """Candidates for the most probable tokens of some rows, on their way to the host; all tensors [rows, candidates]."""

    token_ids: Tensor
    scores: Tensor
    logprobs: Tensor

    def top(self, index: int, n: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Return ids and logprobs of the n most probable tokens of the row at `index` of those requested.

        Best first, the lower id first on a tie; more on a tie at the nth (on a GPU up to `TIES`), none of probability 0.
        """
        scores = self.scores[index].tolist()
        nth = scores[min(n, len(scores)) - 1]
        candidates = zip(scores, self.token_ids[index].tolist(), self.logprobs[index].tolist(), strict=True)
        best = sorted((-score, *rest) for score, *rest in candidates if score >= nth and score > -math.inf)
        return tuple(token for _, token, _ in best), tuple(logprob for _, _, logprob in best)


def top_candidates(sampled: SampledTensors, rows: Sequence[int], n: int) -> TopCandidates:
    """Launch the search for the `n` most probable tokens of some `rows` of a step; it can be read when the device is past this point."""
    index = upload(rows, torch.int64, sampled.scores.device)
    scores = sampled.scores.index_select(0, index)
    count = min(n + TIES, scores.shape[1])
    if not scores.is_cuda and not scores.is_meta:
        # On a CPU reading is free: count all that tie with the nth.
        nth = scores.topk(min(n, scores.shape[1]), dim=-1).values[:, -1:]
        count = int((scores >= nth).sum(1).max())
    best = scores.topk(count, dim=-1)
    logprobs = best.values - sampled.normalizers.index_select(0, index).unsqueeze(1)
    return TopCandidates(download(best.indices), download(best.values), download(logprobs))
