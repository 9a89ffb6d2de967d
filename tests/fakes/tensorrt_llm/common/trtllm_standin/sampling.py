"""Behaviour of SamplingParams and GuidedDecodingParams; their fields are recorded. 1.2.1: sampling_params.py."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtllm_standin.guides import Tokenizer
    from trtllm_standin.release import Release

MAX_TOP_LOGPROBS = 20


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
        release: Release

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
        for name in ("logprobs", "prompt_logprobs") if self.release.limits_logprobs else ():
            wanted = getattr(self, name)
            if wanted is not None and not 0 <= wanted <= MAX_TOP_LOGPROBS:
                raise ValueError(f"{name} must be between 0 and {MAX_TOP_LOGPROBS}, got {wanted}")

    @property
    def _greedy_decoding(self) -> bool:
        """A request with nothing set is greedy; one with a temperature or top_p of 1 is not."""
        nothing_set = self.temperature is None and self.top_p is None and self.top_k is None
        if nothing_set and self.release.min_p_is_sampling and self.min_p:
            return bool(self.min_p == 1)
        return bool(nothing_set or self.top_k == 1 or self.top_p == 0 or self.temperature == 0)

    def _setup(self, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]) -> None:
        """Set end_id from the tokenizer, in the caller's object. Only then do further EOS tokens become stop tokens."""
        self.end_id = self.pad_id = tokenizer.eos_token_id
        further = [token for token in eos_token_ids if token != self.end_id]
        if further:
            self.stop_token_ids = list(dict.fromkeys([*(self.stop_token_ids or ()), *further]))
