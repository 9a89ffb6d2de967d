"""What the choice of a row's token hangs on, besides its logits."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from text_generation_proto.values import Sampling


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One row of a step's logits."""

    sampling: Sampling
    position: int
    """Index, in its sequence, of the token to choose."""
    last_token: int
    history: Tensor | None = None
    """[position] ids of all tokens so far; needed where `needs_history` says so."""
    generated: int = 0
    """How many of the last of these were generated."""
    suppressed: frozenset[int] = frozenset()
    """Tokens that may not be chosen, grammar or not; ids beyond the vocabulary mean nothing."""
    allowed: Tensor | None = None
    """[vocabulary] bool: what the grammar leaves; None without one."""


def needs_history(sampling: Sampling) -> bool:
    """Whether a row with these settings must know all its tokens."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty != 0.0
        or sampling.output_frequency_penalty != 0.0
        or sampling.output_presence_penalty != 0.0
    )
