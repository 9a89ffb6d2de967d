"""The most probable tokens of some rows, told beside the chosen ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_shard.engines.torch.sampling.choose import Choices
from text_generation_shard.engines.torch.upload import download, upload

TIES = 16
"""How many more tokens than asked for are fetched of a row on a GPU, in case they tie with the last of those."""


@dataclass(frozen=True, slots=True)
class TopCandidates:
    """Tokens of some rows, on their way to the host; all tensors [rows, candidates]."""

    token_ids: Tensor
    scores: Tensor
    logprobs: Tensor

    def top(self, place: int, n: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Ids and logprobs of the n most probable tokens of the row at `place` among those asked for.

        Best first, the lower id first on a tie; more on a tie at the nth (on a GPU up to `TIES`), none of probability 0.
        """
        scores = self.scores[place].tolist()
        nth = scores[min(n, len(scores)) - 1]
        candidates = zip(scores, self.token_ids[place].tolist(), self.logprobs[place].tolist(), strict=True)
        best = sorted((-score, *rest) for score, *rest in candidates if score >= nth and score > -math.inf)
        return tuple(token for _, token, _ in best), tuple(logprob for _, _, logprob in best)


def top_candidates(choices: Choices, rows: Sequence[int], n: int) -> TopCandidates:
    """Launch the search for the `n` most probable tokens, or fewer, of some `rows` of a step.

    They can be read when the device is past this point of the stream.
    """
    index = upload(rows, torch.int64, choices.scores.device)
    scores = choices.scores.index_select(0, index)
    count = min(n + TIES, scores.shape[1])
    if not scores.is_cuda and not scores.is_meta:
        # Here it costs nothing to look: all that tie with the nth.
        nth = scores.topk(min(n, scores.shape[1]), dim=-1).values[:, -1:]
        count = int((scores >= nth).sum(1).max())
    best = scores.topk(count, dim=-1)
    logprobs = best.values - choices.normalizers.index_select(0, index).unsqueeze(1)
    return TopCandidates(download(best.indices), download(best.values), download(logprobs))
