"""The stages that look at single tokens: what was said before, what is favoured, what may be chosen at all.

In this order: watermark, repetition penalty, frequency penalty (TGI's three), the output penalties and the bias (OpenAI's),
tokens suppressed, grammar. All in place on `scores` [rows, vocabulary]; a stage nobody asks for costs a look at each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from text_generation_shard.sampling_rows import SamplingRow

WATERMARK_KEY = 15485863
WATERMARK_GAMMA = 0.5
WATERMARK_DELTA = 2.0
"""TGI's: seed factor, share of the vocabulary that is favoured, and by how much (Kirchenbauer et al. 2023)."""

Places = tuple[Tensor, Tensor]
"""Rows and tokens: as an index, one place each in `scores`."""


def adjust(scores: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Run every stage, in place, over the rows that ask for it."""
    for i, row in enumerate(rows):
        if row.sampling.watermark:
            _watermark(scores[i], row.last_token)
    if asking := [i for i, row in enumerate(rows) if row.sampling.repetition_penalty != 1.0]:
        _penalize_repetition(scores, rows, asking)
    if asking := [i for i, row in enumerate(rows) if row.sampling.frequency_penalty != 0.0]:
        _penalize_frequency(scores, rows, asking)
    if asking := [i for i, row in enumerate(rows) if row.generated and _penalizes_output(row)]:
        _penalize_output(scores, rows, asking)
    if asking := [i for i, row in enumerate(rows) if row.sampling.logit_bias_ids]:
        _bias(scores, rows, asking)
    if asking := [i for i, row in enumerate(rows) if row.suppressed]:
        _suppress(scores, rows, asking)
    if asking := [i for i, row in enumerate(rows) if row.allowed is not None]:
        _keep_to_grammar(scores, rows, asking)


def _watermark(scores: Tensor, last_token: int) -> None:
    """Favour the green list of `last_token` in `scores` [vocabulary]; drawn on the CPU, so the same on every device."""
    generator = torch.Generator().manual_seed(WATERMARK_KEY * last_token)
    vocabulary = scores.shape[0]
    green = torch.randperm(vocabulary, generator=generator)[: int(vocabulary * WATERMARK_GAMMA)]
    scores[green.to(scores.device)] += WATERMARK_DELTA


def _histories(
    scores: Tensor,
    rows: Sequence[SamplingRow],
    indices: list[int],
    part: Callable[[SamplingRow, Tensor], Tensor] = lambda _, history: history,
) -> tuple[Places, Tensor]:
    """The tokens of some rows, or `part` of them, as places, and how many tokens each of these rows has."""
    tokens = [part(rows[i], history) for i in indices if (history := rows[i].history) is not None]
    lengths = torch.tensor([history.numel() for history in tokens], device=scores.device)
    return (torch.tensor(indices, device=scores.device).repeat_interleave(lengths), torch.cat(tokens)), lengths


def _penalize_repetition(scores: Tensor, rows: Sequence[SamplingRow], indices: list[int]) -> None:
    """A token seen before: negative scores times p, others divided by p, once (Keskar et al. 2019)."""
    places, lengths = _histories(scores, rows, indices)
    penalties = torch.tensor([rows[i].sampling.repetition_penalty for i in indices], device=scores.device)
    penalties = penalties.repeat_interleave(lengths)
    seen = scores[places]
    # A token seen twice is written twice, with the same number.
    scores[places] = torch.where(seen < 0, seen * penalties, seen / penalties)


def _penalize_frequency(scores: Tensor, rows: Sequence[SamplingRow], indices: list[int]) -> None:
    """Minus f · count / length, over prompt and output, with the row's own length."""
    places, lengths = _histories(scores, rows, indices)
    penalties = torch.tensor([-rows[i].sampling.frequency_penalty for i in indices], device=scores.device)
    scores.index_put_(places, (penalties / lengths).repeat_interleave(lengths), accumulate=True)


def _penalizes_output(row: SamplingRow) -> bool:
    return row.sampling.output_frequency_penalty != 0.0 or row.sampling.output_presence_penalty != 0.0


def _penalize_output(scores: Tensor, rows: Sequence[SamplingRow], indices: list[int]) -> None:
    """Minus p once and f · count, over the generated tokens alone: OpenAI's formula for its two penalties."""
    places, lengths = _histories(scores, rows, indices, lambda row, history: history[-row.generated :])
    presence = torch.tensor([rows[i].sampling.output_presence_penalty for i in indices], device=scores.device)
    # A token seen twice is written twice, with the same number.
    scores[places] = scores[places] - presence.repeat_interleave(lengths)
    frequency = torch.tensor([-rows[i].sampling.output_frequency_penalty for i in indices], device=scores.device)
    scores.index_put_(places, frequency.repeat_interleave(lengths), accumulate=True)


def _bias(scores: Tensor, rows: Sequence[SamplingRow], indices: list[int]) -> None:
    """Plus the value given for each token; a token named twice gets both."""
    places = _places(scores, ((i, rows[i].sampling.logit_bias_ids) for i in indices))
    values = [value for i in indices for value in rows[i].sampling.logit_bias_values]
    scores.index_put_(places, torch.tensor(values, dtype=scores.dtype, device=scores.device), accumulate=True)


def _suppress(scores: Tensor, rows: Sequence[SamplingRow], indices: list[int]) -> None:
    vocabulary = scores.shape[1]
    known = ((i, [token for token in rows[i].suppressed if token < vocabulary]) for i in indices)
    scores[_places(scores, known)] = -torch.inf


def _places(scores: Tensor, named: Iterable[tuple[int, Sequence[int]]]) -> Places:
    """Some tokens of some rows as places."""
    pairs = [(i, token) for i, tokens in named for token in tokens]
    columns = torch.tensor(pairs, dtype=torch.int64, device=scores.device).view(-1, 2)
    return columns[:, 0], columns[:, 1]


def _keep_to_grammar(scores: Tensor, rows: Sequence[SamplingRow], indices: list[int]) -> None:
    masks = [mask for i in indices if (mask := rows[i].allowed) is not None]
    forbidden = torch.stack(masks).logical_not_().to(scores.device)
    if len(indices) == len(rows):
        scores.masked_fill_(forbidden, -torch.inf)
    else:
        scores[indices] = scores[indices].masked_fill_(forbidden, -torch.inf)
