"""Token ids of sequences on the device, for the penalties: a step appends new ids instead of copying all of them."""

from collections.abc import Iterable
from collections.abc import Sequence as Sequences

import torch
from torch import Tensor

from text_generation_shard.engines.torch.device.copies import upload
from text_generation_shard.step.sequence import Sequence


class TokenHistories:
    """For each slot, the tokens of the sequence that was last requested there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tokens = torch.empty(0, 0, dtype=torch.int32, device=device)
        """[slots, capacity]"""
        self._stored: dict[int, tuple[Sequence, int]] = {}
        """By slot: the sequence whose tokens are stored, and their number."""

    def update(self, sequences: Iterable[Sequence]) -> None:
        """Bring several sequences up to date in one copy; `tokens` would need one copy each."""
        behind = [each for each in sequences if self._stored.get(each.slot) != (each, len(each.tokens))]
        if not behind:
            return
        self._grow(behind)
        indices: list[int] = []
        tokens: list[int] = []
        capacity = self._tokens.shape[1]
        for sequence in behind:
            owner, count = self._stored.get(sequence.slot, (None, 0))
            new = sequence.tokens[count if owner is sequence else 0 :]
            end = sequence.slot * capacity + len(sequence.tokens)
            indices.extend(range(end - len(new), end))
            tokens.extend(new)
            self._stored[sequence.slot] = (sequence, len(sequence.tokens))
        sent = upload(indices + tokens, torch.int64, self._device)
        self._tokens.view(-1).index_copy_(0, sent[: len(indices)], sent[len(indices) :].int())

    def tokens(self, sequence: Sequence) -> Tensor:
        """Return the ids of the sequence so far, int32 [tokens]; valid until the next update."""
        self.update([sequence])
        return self._tokens[sequence.slot, : len(sequence.tokens)]

    def along(self, sequence: Sequence, drafts: Sequences[int]) -> Tensor:
        """Return the ids of the sequence so far and of its drafts; later updates overwrite the drafts."""
        known = len(sequence.tokens)
        sequence.tokens.extend(drafts)
        tokens = self.tokens(sequence)
        del sequence.tokens[known:]
        self._stored[sequence.slot] = sequence, known
        return tokens

    def clear(self) -> None:
        self._stored.clear()

    def _grow(self, sequences: list[Sequence]) -> None:
        slots, capacity = self._tokens.shape
        last_slot = max(sequence.slot for sequence in sequences)
        longest = max(sequence.prompt_length + sequence.stopping.max_new_tokens for sequence in sequences)
        if last_slot < slots and longest <= capacity:
            return
        # Grow to the next power of two, so that this is rare. The contents are uploaded again from the host.
        shape = [max(old, 1 << (new - 1).bit_length()) for old, new in ((slots, last_slot + 1), (capacity, longest))]
        self._tokens = torch.empty(shape, dtype=torch.int32, device=self._device)
        self._stored.clear()
