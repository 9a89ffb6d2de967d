"""The stages that change single tokens: penalties for earlier tokens, biases, and masks.

In this order: watermark, repetition penalty, frequency penalty (TGI's three), the output penalties and the logit bias (OpenAI's),
suppressed tokens, grammar. All work in place on `scores` [rows, vocabulary]. A stage that no row uses costs one look at each row.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_proto.values import Sampling
from text_generation_shard.engines.torch.device.copies import upload, upload_rows

WATERMARK_KEY = 15485863
"""TGI's factor from the last token to the seed."""
WATERMARK_GAMMA = 0.5
"""TGI's share of the vocabulary on the green list."""
WATERMARK_DELTA = 2.0
"""TGI's bonus for the green list (Kirchenbauer et al. 2023)."""

Entries = tuple[Tensor, Tensor]
"""Row and token indices: selects one entry of `scores` for each pair."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One row of a step's logits: the parameters and the context of its choice."""

    sampling: Sampling
    position: int
    """Index, in its sequence, of the token to choose."""
    last_token: int
    history: Tensor | None = None
    """[position] ids of all tokens so far; required if `needs_history`."""
    generated: int = 0
    """Number of generated tokens at the end of the history."""
    suppressed: frozenset[int] = frozenset()
    """Tokens that must not be chosen. Ids beyond the vocabulary are ignored."""
    allowed: Tensor | None = None
    """[vocabulary] bool: tokens that the grammar allows; None without a grammar."""


def needs_history(sampling: Sampling) -> bool:
    """Return True if a row with these parameters needs the ids of all its tokens."""
    return sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0 or _penalizes_output(sampling)


def _penalizes_output(sampling: Sampling) -> bool:
    return sampling.output_frequency_penalty != 0.0 or sampling.output_presence_penalty != 0.0


def apply_penalties(scores: Tensor, rows: Sequence[SamplingRow]) -> None:
    for i, row in enumerate(rows):
        if row.sampling.watermark:
            _watermark(scores[i], row.last_token)
    if used := [i for i, row in enumerate(rows) if row.sampling.repetition_penalty != 1.0]:
        _penalize_repetition(scores, rows, used)
    if used := [i for i, row in enumerate(rows) if row.sampling.frequency_penalty != 0.0]:
        _penalize_frequency(scores, rows, used)
    if used := [i for i, row in enumerate(rows) if row.generated and _penalizes_output(row.sampling)]:
        _penalize_output(scores, rows, used)
    if used := [i for i, row in enumerate(rows) if row.sampling.logit_bias_ids]:
        _bias(scores, rows, used)
    if used := [i for i, row in enumerate(rows) if row.suppressed]:
        _suppress(scores, rows, used)
    if used := [i for i, row in enumerate(rows) if row.allowed is not None]:
        _mask(scores, rows, used)


def _watermark(scores: Tensor, last_token: int) -> None:
    """Favour the green list of `last_token` in `scores` [vocabulary]. Drawn on the CPU: the same on every device."""
    generator = torch.Generator().manual_seed(WATERMARK_KEY * last_token)
    vocabulary = scores.shape[0]
    green = torch.randperm(vocabulary, generator=generator)[: int(vocabulary * WATERMARK_GAMMA)]
    scores[upload_rows([green], scores.device)[0]] += WATERMARK_DELTA


def _history_entries(
    scores: Tensor, histories: dict[int, Tensor], *parameters: Sequence[float]
) -> tuple[Entries, Tensor]:
    """Return the entries of all tokens in `histories`, and the parameters [len(parameters), entries] of their rows.

    `histories` maps a row to its tokens; each of `parameters` has one value per row, in that order.
    """
    device = scores.device
    lengths = [tokens.numel() for tokens in histories.values()]
    rows, repeats = upload([*histories, *lengths], torch.int64, device).view(2, -1)
    owners = torch.repeat_interleave(repeats, output_size=sum(lengths))
    values = upload([value for column in parameters for value in column], torch.float32, device)
    return (rows[owners], torch.cat(list(histories.values())).long()), values.view(len(parameters), -1)[:, owners]


def _histories(rows: Sequence[SamplingRow], indices: list[int]) -> dict[int, Tensor]:
    return {i: history for i in indices if (history := rows[i].history) is not None}


def _penalize_repetition(scores: Tensor, rows: Sequence[SamplingRow], indices: list[int]) -> None:
    """Multiply negative scores of earlier tokens by p and divide others by p, once (Keskar et al. 2019)."""
    penalties = [rows[i].sampling.repetition_penalty for i in indices]
    entries, (penalty,) = _history_entries(scores, _histories(rows, indices), penalties)
    seen = scores[entries]
    # A token seen twice is written twice, with the same value.
    scores[entries] = torch.where(seen < 0, seen * penalty, seen / penalty)


def _penalize_frequency(scores: Tensor, rows: Sequence[SamplingRow], indices: list[int]) -> None:
    """Subtract f · count / length, over prompt and output, with the row's own length."""
    histories = _histories(rows, indices)
    penalties = [-rows[i].sampling.frequency_penalty for i in indices]
    lengths = [tokens.numel() for tokens in histories.values()]
    entries, (penalty, length) = _history_entries(scores, histories, penalties, lengths)
    scores.index_put_(entries, penalty / length, accumulate=True)


def _penalize_output(scores: Tensor, rows: Sequence[SamplingRow], indices: list[int]) -> None:
    """Subtract p once and f · count, over the generated tokens only: OpenAI's formula for its two penalties."""
    histories = {i: history[-rows[i].generated :] for i, history in _histories(rows, indices).items()}
    presences = [rows[i].sampling.output_presence_penalty for i in indices]
    frequencies = [-rows[i].sampling.output_frequency_penalty for i in indices]
    entries, (presence, frequency) = _history_entries(scores, histories, presences, frequencies)
    # A token seen twice is written twice, with the same value.
    scores[entries] = scores[entries] - presence
    scores.index_put_(entries, frequency, accumulate=True)


def _bias(scores: Tensor, rows: Sequence[SamplingRow], indices: list[int]) -> None:
    """Add the bias of each token; a token listed twice gets both."""
    entries = _entries(scores, ((i, rows[i].sampling.logit_bias_ids) for i in indices))
    values = [value for i in indices for value in rows[i].sampling.logit_bias_values]
    scores.index_put_(entries, upload(values, scores.dtype, scores.device), accumulate=True)


def _suppress(scores: Tensor, rows: Sequence[SamplingRow], indices: list[int]) -> None:
    vocabulary = scores.shape[1]
    known = ((i, [token for token in rows[i].suppressed if token < vocabulary]) for i in indices)
    # A tensor, because a Python number would be copied from pageable memory.
    scores[_entries(scores, known)] = scores.new_full((), -torch.inf)


def _entries(scores: Tensor, tokens_of: Iterable[tuple[int, Sequence[int]]]) -> Entries:
    pairs = [(i, token) for i, tokens in tokens_of for token in tokens]
    columns = upload([number for pair in pairs for number in pair], torch.int64, scores.device).view(-1, 2)
    return columns[:, 0], columns[:, 1]


def _mask(scores: Tensor, rows: Sequence[SamplingRow], indices: list[int]) -> None:
    masks = [mask for i in indices if (mask := rows[i].allowed) is not None]
    forbidden = upload_rows(masks, scores.device).logical_not_()
    if len(indices) == len(rows):
        scores.masked_fill_(forbidden, -torch.inf)
    else:
        index = upload(indices, torch.int64, scores.device)
        scores.index_copy_(0, index, scores.index_select(0, index).masked_fill_(forbidden, -torch.inf))
