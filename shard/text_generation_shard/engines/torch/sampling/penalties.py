"""The stages that look at single tokens: what was said before, what is favoured, what may be chosen at all.

In this order: watermark, repetition penalty, frequency penalty (TGI's three), the output penalties and the bias (OpenAI's),
tokens suppressed, grammar. All in place on `scores` [rows, vocabulary]; a stage nobody asks for costs a look at each row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from text_generation_shard.engines.torch.sampling.rows import SamplingRow
from text_generation_shard.engines.torch.upload import upload, upload_rows

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
    scores[upload_rows([green], scores.device)[0]] += WATERMARK_DELTA


def _said(scores: Tensor, histories: dict[int, Tensor], *numbers: Sequence[float]) -> tuple[Places, Tensor]:
    """The tokens of some rows, laid end to end, as places; and at each the `numbers` [len(numbers), places] of its row.

    `histories` tells for each of these rows its tokens, and `numbers` are in that order.
    """
    device = scores.device
    lengths = [tokens.numel() for tokens in histories.values()]
    rows, repeats = upload([*histories, *lengths], torch.int64, device).view(2, -1)
    owners = torch.repeat_interleave(repeats, output_size=sum(lengths))
    told = upload([number for column in numbers for number in column], torch.float32, device)
    return (rows[owners], torch.cat(list(histories.values())).long()), told.view(len(numbers), -1)[:, owners]


def _histories(rows: Sequence[SamplingRow], indices: list[int]) -> dict[int, Tensor]:
    return {i: history for i in indices if (history := rows[i].history) is not None}


def _penalize_repetition(scores: Tensor, rows: Sequence[SamplingRow], indices: list[int]) -> None:
    """A token seen before: negative scores times p, others divided by p, once (Keskar et al. 2019)."""
    penalties = [rows[i].sampling.repetition_penalty for i in indices]
    places, (penalty,) = _said(scores, _histories(rows, indices), penalties)
    seen = scores[places]
    # A token seen twice is written twice, with the same number.
    scores[places] = torch.where(seen < 0, seen * penalty, seen / penalty)


def _penalize_frequency(scores: Tensor, rows: Sequence[SamplingRow], indices: list[int]) -> None:
    """Minus f · count / length, over prompt and output, with the row's own length."""
    histories = _histories(rows, indices)
    penalties = [-rows[i].sampling.frequency_penalty for i in indices]
    places, (penalty, length) = _said(scores, histories, penalties, [tokens.numel() for tokens in histories.values()])
    scores.index_put_(places, penalty / length, accumulate=True)


def _penalizes_output(row: SamplingRow) -> bool:
    return row.sampling.output_frequency_penalty != 0.0 or row.sampling.output_presence_penalty != 0.0


def _penalize_output(scores: Tensor, rows: Sequence[SamplingRow], indices: list[int]) -> None:
    """Minus p once and f · count, over the generated tokens alone: OpenAI's formula for its two penalties."""
    histories = {i: history[-rows[i].generated :] for i, history in _histories(rows, indices).items()}
    presences = [rows[i].sampling.output_presence_penalty for i in indices]
    frequencies = [-rows[i].sampling.output_frequency_penalty for i in indices]
    places, (presence, frequency) = _said(scores, histories, presences, frequencies)
    # A token seen twice is written twice, with the same number.
    scores[places] = scores[places] - presence
    scores.index_put_(places, frequency, accumulate=True)


def _bias(scores: Tensor, rows: Sequence[SamplingRow], indices: list[int]) -> None:
    """Plus the value given for each token; a token named twice gets both."""
    places = _places(scores, ((i, rows[i].sampling.logit_bias_ids) for i in indices))
    values = [value for i in indices for value in rows[i].sampling.logit_bias_values]
    scores.index_put_(places, upload(values, scores.dtype, scores.device), accumulate=True)


def _suppress(scores: Tensor, rows: Sequence[SamplingRow], indices: list[int]) -> None:
    vocabulary = scores.shape[1]
    known = ((i, [token for token in rows[i].suppressed if token < vocabulary]) for i in indices)
    # A number written as such would be copied from pageable memory.
    scores[_places(scores, known)] = scores.new_full((), -torch.inf)


def _places(scores: Tensor, named: Iterable[tuple[int, Sequence[int]]]) -> Places:
    """Some tokens of some rows as places."""
    pairs = [(i, token) for i, tokens in named for token in tokens]
    columns = upload([number for pair in pairs for number in pair], torch.int64, scores.device).view(-1, 2)
    return columns[:, 0], columns[:, 1]


def _keep_to_grammar(scores: Tensor, rows: Sequence[SamplingRow], indices: list[int]) -> None:
    masks = [mask for i in indices if (mask := rows[i].allowed) is not None]
    forbidden = upload_rows(masks, scores.device).logical_not_()
    if len(indices) == len(rows):
        scores.masked_fill_(forbidden, -torch.inf)
    else:
        places = upload(indices, torch.int64, scores.device)
        scores.index_copy_(0, places, scores.index_select(0, places).masked_fill_(forbidden, -torch.inf))
