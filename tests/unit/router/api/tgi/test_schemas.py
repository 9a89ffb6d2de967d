"""TGI bodies are as strict as TGI's: no coercion but 1.0 as 1, sized numbers."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from text_generation_router.api.tgi.schemas import CompatGenerateBody, GenerateBody

OPTIONAL = [
    "best_of", "temperature", "repetition_penalty", "frequency_penalty", "top_k", "top_p", "typical_p", "max_new_tokens",
    "return_full_text", "truncate", "seed", "top_n_tokens", "grammar", "adapter_id",
]  # fmt: skip


@pytest.mark.parametrize("name", OPTIONAL)
def test_null_is_absence_for_an_optional_parameter(name: str) -> None:
    body = GenerateBody.model_validate({"inputs": "Hello", "parameters": {name: None}})
    assert getattr(body.parameters, name) is None


@pytest.mark.parametrize(
    "parameters",
    [
        {"best_of": -1}, {"best_of": 2**64}, {"temperature": "1"}, {"temperature": True},
        {"temperature": 1e39}, {"top_k": 2**31}, {"top_k": 1.5}, {"max_new_tokens": 2**32}, {"max_new_tokens": -1},
        {"max_new_tokens": True}, {"max_new_tokens": "1"}, {"seed": 2**64}, {"seed": -1}, {"do_sample": 1},
        {"do_sample": None}, {"details": "true"}, {"stop": None}, {"stop": "a"}, {"stop": ["a", 1]}, {"watermark": 0},
        {"grammar": "a"}, {"adapter_id": 1}, [], None,
    ],
)  # fmt: skip
def test_nothing_is_coerced(parameters: object) -> None:
    with pytest.raises(ValidationError):
        GenerateBody.model_validate({"inputs": "Hello", "parameters": parameters})


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
def test_a_seed_has_64_bits(seed: int) -> None:
    assert GenerateBody.model_validate({"inputs": "Hello", "parameters": {"seed": seed}}).parameters.seed == seed


def test_a_float_may_be_written_as_an_integer_and_has_32_bits() -> None:
    body = GenerateBody.model_validate({"inputs": "Hello", "parameters": {"temperature": 1, "top_p": 0.1}})
    assert body.parameters.temperature == 1.0
    assert body.parameters.top_p == pytest.approx(0.1)
    assert body.parameters.top_p != 0.1


def test_do_sample_is_true_only_without_parameters() -> None:
    assert GenerateBody.model_validate({"inputs": "Hello"}).parameters.do_sample is True
    assert GenerateBody.model_validate({"inputs": "Hello", "parameters": {}}).parameters.do_sample is False


def test_unknown_fields_are_ignored() -> None:
    body = CompatGenerateBody.model_validate({"inputs": "Hello", "stream": True, "model": "x", "parameters": {"x": 1}})
    assert body.stream is True
