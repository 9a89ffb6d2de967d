"""The tokens of sequences as tensors, for the penalties: each step adds what is new instead of copying all."""

from __future__ import annotations

import torch
from torch import Tensor

from text_generation_shard.sequences import Sequence


class TokenHistories:
    """For each slot, the tokens of the sequence in it that was asked for last."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[int, tuple[Sequence, Tensor, int]] = {}

    def tokens(self, sequence: Sequence) -> Tensor:
        """[tokens] ids of the sequence so far."""
        tenant, buffer, count = self._held.get(sequence.slot, (None, None, 0))
        if tenant is not sequence or buffer is None:
            room = sequence.prompt_length + sequence.stopping.max_new_tokens
            buffer, count = torch.empty(room, dtype=torch.int64, device=self._device), 0
        length = len(sequence.tokens)
        buffer[count:length] = torch.tensor(sequence.tokens[count:], device=self._device)
        self._held[sequence.slot] = (sequence, buffer, length)
        return buffer[:length]

    def forget(self) -> None:
        """Every slot is empty."""
        self._held.clear()
