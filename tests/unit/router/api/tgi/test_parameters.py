"""TGI's rules 0 to 16: their texts and their order. Some over HTTP: tests/integration/test_http_wrong_requests.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from text_generation_proto.parameters import Api
from text_generation_proto.values import LogprobOptions, Sampling
from text_generation_router.api.core.parameters import GenerationOptions, check_options, new_tokens
from text_generation_router.api.core.settings import Limits
from text_generation_router.api.tgi.generate import check_streamed, check_whole, to_options
from text_generation_router.api.tgi.schemas import GenerateParameters
from text_generation_router.errors import InvalidRequest

LIMITS = Limits(max_best_of=2, max_stop_sequences=4, max_top_n_tokens=5, max_input_tokens=10, max_total_tokens=20)

LONG = 30
"""A prompt of more tokens than a request may have in all."""

WHOLE: list[tuple[str, dict[str, Any], str]] = [
    ("0b", {"best_of": 3}, "`best_of` must be > 0 and <= 2. Given: 3"),
    ("1", {"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ("2", {"temperature": 0}, "`temperature` must be strictly positive"),
    ("2", {"temperature": -0.5}, "`temperature` must be strictly positive"),
    ("2", {"temperature": 1e-46}, "`temperature` must be strictly positive"),
    ("3", {"repetition_penalty": 0.0}, "`repetition_penalty` must be strictly positive"),
    ("4", {"frequency_penalty": 2.5}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ("4", {"frequency_penalty": -2.5}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ("5", {"top_p": 0}, "`top_p` must be > 0.0 and < 1.0"),
    ("5", {"top_p": 1}, "`top_p` must be > 0.0 and < 1.0"),
    ("6", {"typical_p": 1.0}, "`typical_p` must be > 0.0 and < 1.0"),
    ("7", {"top_k": 0}, "`top_k` must be strictly positive"),
    ("7", {"top_k": -1}, "`top_k` must be strictly positive"),
    ("8", {"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ("9", {"stop": list("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5"),
    ("10", {"best_of": 2, "do_sample": True, "seed": 1}, "`seed` must not be set when `best_of` > 1"),
    ("11", {"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ("12", {"inputs": ""}, "`inputs` cannot be empty"),
    ("13", {"truncate": 0}, "`truncate` must be strictly positive and less than 10. Given: 0"),
    ("13", {"truncate": 11}, "`truncate` must be strictly positive and less than 10. Given: 11"),
    (
        "15",
        {"input_tokens": 5, "max_new_tokens": 16},
        "`inputs` tokens + `max_new_tokens` must be <= 20. Given: 5 `inputs` tokens and 16 `max_new_tokens`",
    ),
    (
        "15",
        {"input_tokens": LONG},
        "`inputs` tokens + `max_new_tokens` must be <= 20. Given: 30 `inputs` tokens and 0 `max_new_tokens`",
    ),
    ("16", {"input_tokens": 11}, "`inputs` must have less than 10 tokens. Given: 11"),
]


def judge(case: dict[str, Any], first: Callable[[GenerateParameters], None]) -> None:
    """Check all rules in the order of the routes."""
    parameters = GenerateParameters.model_validate(
        {name: value for name, value in case.items() if name not in ("inputs", "input_tokens")}
    )
    first(parameters)
    options = to_options(parameters)
    check_options(case.get("inputs", "Hello"), options, LIMITS)
    new_tokens(case.get("input_tokens", 1), options, LIMITS)


def refusal(case: dict[str, Any], first: Callable[[GenerateParameters], None]) -> str:
    with pytest.raises(InvalidRequest) as refused:
        judge(case, first)
    assert (refused.value.status, refused.value.error_type) == (422, "validation")
    return str(refused.value).removeprefix("Input validation error: ")


def whole(parameters: GenerateParameters) -> None:
    check_whole(parameters, LIMITS)


@pytest.mark.parametrize(("rule", "case", "message"), WHOLE, ids=[f"{rule}-{case}" for rule, case, _ in WHOLE])
def test_a_broken_rule_is_reported_in_tgis_words(rule: str, case: dict[str, Any], message: str) -> None:
    assert refusal(case, whole) == message


def test_the_first_of_two_broken_rules_is_reported() -> None:
    for i, (rule, case, message) in enumerate(WHOLE):
        for later_rule, later, _ in WHOLE[i + 1 :]:
            # No pair: the later case sets the same field, or asks for the sampling that rule 1 misses.
            if rule == later_rule or set(case) & set(later) or (rule == "1" and asks_for_sampling(later)):
                continue
            assert refusal(case | later, whole) == message, (rule, later_rule)


def asks_for_sampling(case: dict[str, Any]) -> bool:
    return bool(case.keys() & {"do_sample", "temperature", "top_k", "top_p", "typical_p"})


def test_best_of_is_refused_if_its_limit_is_1() -> None:
    with pytest.raises(InvalidRequest, match="`best_of` != 1 is not allowed for this endpoint"):
        check_whole(GenerateParameters(best_of=2), Limits(1, 4, 5, 10, 20))


def test_best_of_0_means_1_in_a_whole_reply() -> None:
    judge({"best_of": 0}, whole)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"best_of": 0}, "`best_of` != 1 is not supported when streaming tokens"),
        ({"best_of": 2}, "`best_of` != 1 is not supported when streaming tokens"),
        (
            {"decoder_input_details": True, "temperature": -1.0},
            "`decoder_input_details` == true is not supported when streaming tokens",
        ),
    ],
)
def test_a_stream_has_one_sequence_and_no_prompt_details(case: dict[str, Any], message: str) -> None:
    assert refusal(case, check_streamed) == message


@pytest.mark.parametrize(
    ("parameters", "greedy"),
    [
        ({}, True),
        ({"temperature": 1.0}, True),
        ({"repetition_penalty": 1.3, "frequency_penalty": 0.5}, True),
        ({"do_sample": True}, False),
        ({"temperature": 0.5}, False),
        ({"top_k": 5}, False),
        ({"top_p": 0.5}, False),
        ({"typical_p": 0.5}, False),
    ],
)
def test_sampling_is_greedy_unless_a_parameter_is_not_neutral(parameters: dict[str, Any], greedy: bool) -> None:
    assert to_options(GenerateParameters.model_validate(parameters)).sampling.greedy is greedy


def test_every_parameter_reaches_the_options() -> None:
    sampling = {
        "temperature": 0.5,
        "repetition_penalty": 1.25,
        "frequency_penalty": -0.5,
        "top_p": 0.75,
        "typical_p": 0.25,
        "top_k": 7,
        "watermark": True,
        "seed": 0,
    }
    others = {"max_new_tokens": 3, "stop": ["a"], "truncate": 4, "top_n_tokens": 2, "decoder_input_details": True}
    options = to_options(GenerateParameters.model_validate(sampling | others | {"grammar": {"type": "regex"}}))
    assert options == GenerationOptions(
        Api.TGI,
        Sampling(greedy=False, **sampling),  # type: ignore[arg-type]
        max_new_tokens=3,
        stop_sequences=("a",),
        keep_stop_text=True,
        logprobs=LogprobOptions(2, prompt=True, tokens=True),
        grammar={"type": "regex"},
        truncate=4,
    )
    assert to_options(GenerateParameters()).sampling == Sampling(seed=None)


ROOMY = replace(LIMITS, max_input_tokens=2000, max_total_tokens=2048)


@pytest.mark.parametrize(
    ("limits", "input_tokens", "asked", "granted"),
    [
        (LIMITS, 1, None, 19),
        (LIMITS, 10, None, 10),
        (LIMITS, 10, 10, 10),
        (LIMITS, 1, 1, 1),
        (ROOMY, 5, 100_000, 2043),
        (ROOMY, 1024, 100_000, 1024),
        (ROOMY, 5, 1500, 1500),
        (ROOMY, 1000, 1040, 1040),
    ],
)
def test_new_tokens_are_all_that_fit_and_rule_15_checks_1024_of_them(
    limits: Limits, input_tokens: int, asked: int | None, granted: int
) -> None:
    assert new_tokens(input_tokens, to_options(GenerateParameters(max_new_tokens=asked)), limits) == granted


def test_rule_15_reports_the_tokens_it_checked() -> None:
    with pytest.raises(InvalidRequest, match="Given: 1025 `inputs` tokens and 1024 `max_new_tokens`"):
        new_tokens(1025, to_options(GenerateParameters(max_new_tokens=100_000)), ROOMY)
