"""Behaviour of SamplingParams and GuidedDecodingParams; their fields are recorded. 1.2.1: sampling_params.py."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any


class GuideMethods:
    """Behaviour of GuidedDecodingParams."""

    __slots__ = ()

    def _validate(self) -> None:
        """Allow one guide at most; empty values count as absent."""
        if sum(bool(getattr(self, field.name)) for field in fields(self)) > 1:  # type: ignore[arg-type]
            raise ValueError(f"Only one guide can be used for a request, but got {self}")


class SamplingMethods:
    """Behaviour of SamplingParams."""

    __slots__ = ()
    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # noqa: ANN401 - the recorded fields

        def __setattr__(self, name: str, value: object) -> None: ...

    def __post_init__(self) -> None:
        if self.pad_id is None:
            self.pad_id = self.end_id
        self.best_of = self.best_of or self.n
        if self.embedding_bias is not None:
            import torch

            bias = self.embedding_bias
            is_tensor = isinstance(bias, torch.Tensor)
            self.embedding_bias = bias.detach().clone() if is_tensor else torch.tensor(bias, dtype=torch.float32)
        self._validate()

    def _validate(self) -> None:
        """Raise ValueError. Values not checked here (max_tokens, penalties, seed) may be refused later by the engine."""
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"require top_k >= 0, got top_k={self.top_k}")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"require temperature >= 0, got temperature={self.temperature}")
        if self.guided_decoding is not None:
            self.guided_decoding._validate()
