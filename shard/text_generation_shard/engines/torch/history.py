"""The tokens of sequences on the device, for the penalties: each step adds what is new instead of copying all."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from text_generation_shard.engines.torch.upload import upload
from text_generation_shard.step.sequence import Sequence


class TokenHistories:
    """For each slot, the tokens of the sequence in it that was asked for last."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tokens = torch.empty(0, 0, dtype=torch.int32, device=device)
        """[slots, room]"""
        self._held: dict[int, tuple[Sequence, int]] = {}
        """By slot: whose tokens these are, and how many."""

    def update(self, sequences: Iterable[Sequence]) -> None:
        """Bring several sequences up to date, in one copy: `tokens` would take one for each."""
        behind = [sequence for sequence in sequences if not self._is_up_to_date(sequence)]
        if not behind:
            return
        self._make_room(behind)
        places: list[int] = []
        tokens: list[int] = []
        room = self._tokens.shape[1]
        for sequence in behind:
            tenant, count = self._held.get(sequence.slot, (None, 0))
            new = sequence.tokens[count if tenant is sequence else 0 :]
            end = sequence.slot * room + len(sequence.tokens)
            places.extend(range(end - len(new), end))
            tokens.extend(new)
            self._held[sequence.slot] = (sequence, len(sequence.tokens))
        sent = upload(places + tokens, torch.int64, self._device)
        self._tokens.view(-1).index_copy_(0, sent[: len(places)], sent[len(places) :].int())

    def tokens(self, sequence: Sequence) -> Tensor:
        """[tokens] ids of the sequence so far, int32; valid until the next update."""
        self.update([sequence])
        return self._tokens[sequence.slot, : len(sequence.tokens)]

    def forget(self) -> None:
        """Every slot is empty."""
        self._held.clear()

    def _is_up_to_date(self, sequence: Sequence) -> bool:
        tenant, count = self._held.get(sequence.slot, (None, 0))
        return tenant is sequence and count == len(sequence.tokens)

    def _make_room(self, sequences: list[Sequence]) -> None:
        slots, room = self._tokens.shape
        last_slot = max(sequence.slot for sequence in sequences)
        longest = max(sequence.prompt_length + sequence.stopping.max_new_tokens for sequence in sequences)
        if last_slot < slots and longest <= room:
            return
        # To the next power of two: seldom. What is held is written again, from the host.
        shape = [max(old, 1 << (new - 1).bit_length()) for old, new in ((slots, last_slot + 1), (room, longest))]
        self._tokens = torch.empty(shape, dtype=torch.int32, device=self._device)
        self._held.clear()
