"""What the rows of a step chose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from text_generation_proto.values import FailureCode


@dataclass(slots=True)
class ChosenToken:
    """What a row chose, or why it could not."""

    token_id: int
    logprob: float
    failure: str | None = None
    failure_code: FailureCode = FailureCode.NUMERICS
    ends: bool = False
    """The grammar is complete: the sequence is over, whatever its stopping says."""


@dataclass(slots=True)
class Chosen:
    """What the rows of a step that sample chose, in order, in columns: exceptions are rare."""

    token_ids: list[int]
    logprobs: list[float]
    failures: dict[int, tuple[FailureCode, str]] = field(default_factory=dict)
    """By place: why there is no token."""
    ends: set[int] = field(default_factory=set)
    """Places where the grammar is complete: the sequence is over, whatever its stopping says."""

    @classmethod
    def of(cls, tokens: Sequence[ChosenToken]) -> Chosen:
        return cls(
            [token.token_id for token in tokens],
            [token.logprob for token in tokens],
            {i: (token.failure_code, token.failure) for i, token in enumerate(tokens) if token.failure is not None},
            {i for i, token in enumerate(tokens) if token.ends},
        )
