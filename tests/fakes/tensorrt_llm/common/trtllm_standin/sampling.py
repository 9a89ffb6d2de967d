"""What both releases' SamplingParams do beyond holding values. 1.2.1: sampling_params.py."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from trtllm_standin.tokenizer import Tokenizer

MANY_GREEDY = "TLLM_ALLOW_N_GREEDY_DECODING"


class GuideMethods:
    """Of GuidedDecodingParams."""

    __slots__ = ()

    def _validate(self) -> None:
        """At most one guide; none at all is taken for no guide. Empty ones count as absent."""
        if sum(bool(getattr(self, field.name)) for field in fields(self)) > 1:  # type: ignore[arg-type]
            raise ValueError(f"Only one guide can be used for a request, but got {self}")


class SamplingMethods:
    """Of SamplingParams. The releases' classes add the fields, all keyword-only, in slots."""

    if not TYPE_CHECKING:
        __slots__ = ()
    else:
        end_id: int | None
        pad_id: int | None
        stop: str | list[str] | None
        stop_token_ids: list[int] | None
        bad: str | list[str] | None
        embedding_bias: torch.Tensor | None
        n: int
        best_of: int | None
        use_beam_search: bool
        top_k: int | None
        top_p: float | None
        temperature: float | None
        truncate_prompt_tokens: int | None
        guided_decoding: Any
        _bad_word_ids: list[list[int]] | None
        _stop_word_ids: list[list[int]] | None

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
        """Raises ValueError. What is not looked at here – max_tokens, min_p, penalties, seed, n = 0 – the engine may refuse
        later, as a RequestError."""
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"require top_k >= 0, got top_k={self.top_k}")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"require temperature >= 0, got temperature={self.temperature}")
        best_of = self.best_of or self.n
        if best_of < self.n:
            raise ValueError(f"best_of ({best_of}) cannot be less than n ({self.n})")
        if best_of > 1 and self._greedy_decoding and os.environ.get(MANY_GREEDY, "0") != "1":
            raise ValueError(
                "Greedy decoding in the LLM API does not allow multiple returns. Please set to best_of=1, got "
                f"best_of={best_of}, or set the environment variable {MANY_GREEDY}=1"
            )
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < 1:
            raise ValueError(f"truncate_prompt_tokens must be >= 1, got {self.truncate_prompt_tokens}")
        if self.guided_decoding is not None:
            self.guided_decoding._validate()

    @property
    def _greedy_decoding(self) -> bool:
        return self.params_imply_greedy_decoding(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, use_beam_search=self.use_beam_search
        )

    @staticmethod
    def params_imply_greedy_decoding(
        *, temperature: float | None, top_p: float | None, top_k: int | None, use_beam_search: bool | None
    ) -> bool:
        """Nothing set is greedy; but a temperature or top_p of 1 alone is sampling."""
        nothing_set = temperature is None and top_p is None and top_k is None
        return not use_beam_search and (nothing_set or top_k == 1 or top_p == 0 or temperature == 0)

    def _setup(self, tokenizer: Tokenizer, hf_model_config: object, generation_config: object) -> SamplingMethods:
        """Fill in from the tokenizer what was left out: the object that was handed in is changed. Only called when no
        end_id was given – and then the model's further end tokens become stop tokens too."""
        if self.end_id is None:
            self.end_id = tokenizer.eos_token_id
            self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.end_id
        if self.stop is not None:
            self._stop_word_ids = [tokenizer.encode(text, add_special_tokens=False) for text in _listed(self.stop)]
        if self.bad is not None:
            self._bad_word_ids = [tokenizer.encode(text, add_special_tokens=False) for text in _listed(self.bad)]
        further = [token for token in getattr(generation_config, "eos_token_ids", ()) if token != self.end_id]
        if further:
            known = self.stop_token_ids or []
            self.stop_token_ids = [*known, *(token for token in further if token not in known)]
        return self

    def _get_stop_words(self) -> list[list[int]]:
        """What ends the answer, as ids. Raises RuntimeError for stop strings that no tokenizer has seen."""
        words = [[token] for token in self.stop_token_ids or ()]
        if self.stop is None:
            return words
        if self._stop_word_ids is None:
            raise RuntimeError(f"{self.stop=} is not processed by tokenizer, please call the `setup` method")
        return words + self._stop_word_ids

    def _get_stop_reasons_and_words(self) -> list[tuple[int | str, list[int]]]:
        """The same with what each is known by, in the order in which the end of an answer is compared with them."""
        reasons: list[int | str] = [
            *(self.stop_token_ids or ()),
            *(_listed(self.stop) if self.stop is not None else ()),
        ]
        return list(zip(reasons, self._get_stop_words(), strict=True))

    def _get_bad_words(self) -> list[list[int]]:
        """What may not be generated, as ids. Raises RuntimeError for strings that no tokenizer has seen."""
        words = [[token] for token in getattr(self, "bad_token_ids", None) or ()]
        if self.bad is None:
            return words
        if self._bad_word_ids is None:
            raise RuntimeError(f"{self.bad=} is not processed by tokenizer, please call the `setup` method")
        return words + self._bad_word_ids


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
