"""Token histories match their sequences, also when slots are reused."""

from __future__ import annotations

import torch

from text_generation_proto.values import Sampling, Stopping
from text_generation_shard.engines.torch.sampling.history import TokenHistories
from text_generation_shard.step.sequence import Sequence

CPU = torch.device("cpu")


def a_sequence(slot: int, tokens: list[int]) -> Sequence:
    return Sequence(slot, tokens, len(tokens), [], 0, 0, 0, Sampling(), Stopping(8), 0, None)


def test_histories_follow_sequences_that_grow_and_change_slots() -> None:
    histories = TokenHistories(CPU)
    sequences = [a_sequence(0, [1, 2, 3]), a_sequence(5, [7]), a_sequence(2, [9, 9])]
    for step in range(6):
        for sequence in sequences:
            sequence.tokens.append(100 * step + sequence.slot)
        if step == 2:
            # As many tokens as the slot has stored: only the owner differs.
            sequences[1] = a_sequence(5, [4, 4, 4])
        if step == 4:
            # A longer sequence in a higher slot than any before: the tensor must grow.
            sequences.append(a_sequence(11, list(range(50))))
        histories.update(sequences[:2])
        for sequence in sequences:
            assert histories.tokens(sequence).tolist() == [*sequence.tokens]


def test_tokens_that_are_up_to_date_are_not_written_again() -> None:
    histories = TokenHistories(CPU)
    sequence = a_sequence(1, [5, 6, 7])
    held = histories.tokens(sequence)
    held[0] = 55  # a marker
    sequence.tokens.append(8)
    histories.update([sequence])
    assert histories.tokens(sequence).tolist() == [55, 6, 7, 8]
    histories.clear()
    assert histories.tokens(sequence).tolist() == [5, 6, 7, 8]
