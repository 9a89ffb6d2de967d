"""Options of OpenAI's and Anthropic's bodies, their ranges, and parameters that an engine does not support."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from text_generation_proto.parameters import Api
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.values import (
    LOGPROB_PARAMETERS,
    SAMPLING_PARAMETERS,
    STOPPING_PARAMETERS,
    LogprobOptions,
    Sampling,
)
from text_generation_router.api.anthropic.input import to_options as message_options
from text_generation_router.api.anthropic.schemas import MessagesBody
from text_generation_router.api.core.parameters import GenerationOptions, check_options, check_supported, new_tokens
from text_generation_router.api.core.settings import Limits
from text_generation_router.api.openai.input import chat_options, completion_options
from text_generation_router.api.openai.schemas import ChatBody, CompletionBody
from text_generation_router.errors import InvalidRequest
from text_generation_router.request import QualityOfService, Request, RequestId

LIMITS = Limits(1, 4, 5, max_input_tokens=10, max_total_tokens=20, vocab_size=100)
PLAIN = Request(RequestId(1), (5, 6, 7), max_new_tokens=20)
WHY = "the engine does not have it"

ASKED: list[tuple[str, dict[str, Any], str]] = [
    ("temperature", {"sampling": Sampling(temperature=0.5)}, "`temperature`"),
    ("top_k", {"sampling": Sampling(top_k=1)}, "`top_k`"),
    ("top_p", {"sampling": Sampling(top_p=0.99)}, "`top_p`"),
    ("typical_p", {"sampling": Sampling(typical_p=0.5)}, "`typical_p`"),
    ("min_p", {"sampling": Sampling(min_p=0.01)}, "`min_p`"),
    ("repetition_penalty", {"sampling": Sampling(repetition_penalty=1.01)}, "`repetition_penalty`"),
    ("frequency_penalty", {"sampling": Sampling(frequency_penalty=-0.1)}, "`frequency_penalty`"),
    ("output_frequency_penalty", {"sampling": Sampling(output_frequency_penalty=0.1)}, "`frequency_penalty`"),
    ("output_presence_penalty", {"sampling": Sampling(output_presence_penalty=0.1)}, "`presence_penalty`"),
    ("logit_bias_ids", {"sampling": Sampling(logit_bias_ids=(1, 2), logit_bias_values=(0.0, 0.5))}, "`logit_bias`"),
    ("allowed_token_ids", {"sampling": Sampling(allowed_token_ids=(0,))}, "`allowed_token_ids`"),
    ("bad_words", {"sampling": Sampling(bad_words=((1,),))}, "`bad_words`"),
    ("watermark", {"sampling": Sampling(watermark=True)}, "`watermark`"),
    ("seed", {"sampling": Sampling(greedy=False, seed=0)}, "`seed`"),
    ("stop_token_ids", {"stop_token_ids": frozenset((3,))}, "`stop_token_ids`"),
    ("min_new_tokens", {"min_new_tokens": 1}, "`min_tokens`"),
    ("top_n", {"logprobs": LogprobOptions(1)}, "`top_n_tokens`"),
    ("prompt", {"logprobs": LogprobOptions(prompt=True)}, "`decoder_input_details`"),
    ("prompt_top_n", {"logprobs": LogprobOptions(prompt_top_n=1)}, "`prompt_logprobs`"),
    ("cache_salt", {"qos": QualityOfService(salt="pepper")}, "`cache_salt`"),
    ("tokens", {"logprobs": LogprobOptions(tokens=True)}, "`logprobs`"),
]


@pytest.mark.parametrize(("name", "changes", "called"), ASKED, ids=[row[0] for row in ASKED])
def test_an_unsupported_parameter_is_refused_by_name(name: str, changes: dict[str, Any], called: str) -> None:
    request = replace(PLAIN, **changes)
    with pytest.raises(InvalidRequest) as refused:
        check_supported(request, Api.CHAT if name == "tokens" else Api.TGI, {name: WHY})
    assert str(refused.value) == f"Input validation error: {called} is not supported by this engine: {WHY}"
    others = {other: WHY for other, _, _ in ASKED if other != name} | {"greedy": WHY, "of_tomorrow": WHY}
    check_supported(request, Api.TGI, others)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sampling": Sampling(greedy=False, seed=None)},
        {"sampling": Sampling(seed=5)},
        {"sampling": Sampling(logit_bias_ids=(1,), logit_bias_values=(0.0,))},
        {"stop_sequences": ("a",), "ignore_eos": True},
        {"logprobs": LogprobOptions(tokens=True)},
    ],
)
def test_neutral_values_are_not_refused(changes: dict[str, Any]) -> None:
    check_supported(replace(PLAIN, **changes), Api.TGI, {name: WHY for name, _, _ in ASKED})


@pytest.mark.parametrize(
    ("api", "field", "name"),
    [
        (Api.CHAT, "top_n", "`top_logprobs`"),
        (Api.COMPLETIONS, "top_n", "`logprobs`"),
        (Api.COMPLETIONS, "prompt", "`prompt_logprobs` or `echo` with `logprobs`"),
        (Api.CHAT, "prompt", "`prompt_logprobs`"),
    ],
)
def test_an_unsupported_parameter_has_the_name_of_its_api(api: Api, field: str, name: str) -> None:
    changes = next(changes for known, changes, _ in ASKED if known == field)
    with pytest.raises(InvalidRequest, match=f"^Input validation error: {name} is not"):
        check_supported(replace(PLAIN, **changes), api, {field: WHY})


def test_every_field_of_the_wire_is_a_parameter_or_set_in_every_request() -> None:
    of_every_request = {
        "greedy",
        "max_new_tokens",
        "eos_token_ids",
        "logit_bias_values",
        "generated",
    }  # generated: of none
    messages = (pb.Sampling, pb.Stopping, pb.LogprobOptions)
    fields = {field.name.removeprefix("no_") for message in messages for field in message.DESCRIPTOR.fields}
    fields = fields - {"bad_word_ids", "bad_word_lengths"} | {"bad_words"}  # two columns of one parameter
    parameters = {one.field for one in (*SAMPLING_PARAMETERS, *STOPPING_PARAMETERS, *LOGPROB_PARAMETERS)}
    assert parameters == fields - of_every_request
    assert {name for name, _, _ in ASKED} == parameters | {"cache_salt"}


def chat(**fields: Any) -> GenerationOptions:  # noqa: ANN401
    return chat_options(ChatBody.model_validate({"messages": [], **fields}))


def completion(**fields: Any) -> GenerationOptions:  # noqa: ANN401
    return completion_options(CompletionBody.model_validate({"prompt": "", **fields}))


def test_every_parameter_of_openais_bodies_reaches_the_options() -> None:
    fields = {
        "temperature": 0.5,
        "repetition_penalty": 1.25,
        "frequency_penalty": -0.5,
        "presence_penalty": 0.25,
        "top_p": 0.75,
        "min_p": 0.125,
        "top_k": 7,
        "seed": -1,
        "logit_bias": {"3": 1.5, "4": -100},
        "allowed_token_ids": [3, 9],
        "bad_words": ["no"],
        "include_stop_str_in_output": True,
        "truncate_prompt_tokens": 50,
        "stop": ["a", ""],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "min_tokens": 2,
        "max_tokens": 9,
    }
    expected = GenerationOptions(
        Api.CHAT,
        Sampling(
            greedy=False,
            temperature=0.5,
            repetition_penalty=1.25,
            output_frequency_penalty=-0.5,
            output_presence_penalty=0.25,
            top_p=0.75,
            min_p=0.125,
            top_k=7,
            seed=2**64 - 1,
            logit_bias_ids=(3, 4),
            logit_bias_values=(1.5, -100),
            allowed_token_ids=(3, 9),
        ),
        bad_words=("no",),
        keep_stop_text=True,
        truncate=50,
        max_new_tokens=9,
        min_new_tokens=2,
        stop_token_ids=(5,),
        ignore_eos=True,
        stop_sequences=("a",),
        length_field="max_tokens",
    )
    assert chat(**fields) == expected
    newer = replace(expected, length_field="max_completion_tokens", logprobs=LogprobOptions(3, tokens=True))
    assert chat(**fields | {"max_completion_tokens": 9, "max_tokens": 1, "top_logprobs": 3}) == newer
    assert completion(**fields) == replace(expected, api=Api.COMPLETIONS)
    assert chat() == GenerationOptions(Api.CHAT, Sampling(greedy=False, seed=None), length_field="max_tokens")


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({"temperature": 0, "top_p": 0.5, "top_k": 5, "seed": 3}, Sampling(seed=3)),
        ({"top_p": 0, "temperature": 0.5}, Sampling(seed=None)),
        ({"top_p": 1.0, "top_k": -1}, Sampling(greedy=False, seed=None)),
        ({"top_p": 1.0, "top_k": 0}, Sampling(greedy=False, seed=None)),
        ({"logit_bias": [1.0]}, Sampling(greedy=False, seed=None)),
    ],
)
def test_a_filter_that_keeps_all_tokens_is_off_and_temperature_0_is_greedy(
    fields: dict[str, Any], sampling: Sampling
) -> None:
    assert chat(**fields).sampling == sampling


@pytest.mark.parametrize(
    ("fields", "tokens", "logprobs"),
    [
        ({"logprobs": 0}, None, LogprobOptions(tokens=True)),
        ({"logprobs": 3}, None, LogprobOptions(3, tokens=True)),
        ({"logprobs": 0, "echo": True}, None, LogprobOptions(prompt=True, tokens=True)),
        ({"logprobs": 3, "echo": True, "max_tokens": 0}, 1, LogprobOptions(3, True, 3, True)),
        ({"echo": True}, None, LogprobOptions()),
        ({"max_tokens": 0}, 0, LogprobOptions()),
    ],
)
def test_completions_report_prompt_logprobs_with_echo(
    fields: dict[str, Any], tokens: int | None, logprobs: LogprobOptions
) -> None:
    options = completion(**fields)
    assert (options.max_new_tokens, options.logprobs) == (tokens, logprobs)


def test_every_parameter_of_anthropics_bodies_reaches_the_options() -> None:
    fields = {"temperature": 0.5, "top_p": 0.75, "top_k": 7, "max_tokens": 9, "stop_sequences": ["a", ""]}
    body = MessagesBody.model_validate({"messages": [], **fields})
    sampling = Sampling(greedy=False, temperature=0.5, top_p=0.75, top_k=7, seed=None)
    assert message_options(body) == GenerationOptions(
        Api.MESSAGES, sampling, max_new_tokens=9, length_field="max_tokens", stop_sequences=("a",)
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.5}, "`temperature` must be >= 0.0"),
        ({"repetition_penalty": 0}, "`repetition_penalty` must be strictly positive"),
        ({"top_p": 2, "temperature": 0}, "`top_p` must be >= 0.0 and <= 1.0"),
        ({"top_p": -1}, "`top_p` must be >= 0.0 and <= 1.0"),
        ({"top_k": -2}, "`top_k` must be >= -1"),
        ({"frequency_penalty": 2.5}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
        ({"presence_penalty": -2.5}, "`presence_penalty` must be >= -2.0 and <= 2.0"),
        ({"min_p": 1.5}, "`min_p` must be >= 0.0 and <= 1.0"),
        ({"min_p": -0.5}, "`min_p` must be >= 0.0 and <= 1.0"),
        ({"logit_bias": {"1": 101}}, "`logit_bias` values must be >= -100 and <= 100"),
        ({"logit_bias": {"100": 1}}, "`logit_bias` has a token id that is not one of 100"),
        ({"logit_bias": {"a": 1}}, "`logit_bias` keys must be token ids"),
        ({"stop_token_ids": [100]}, "`stop_token_ids` has a token id that is not one of 100"),
        ({"stop_token_ids": [1] * 65}, "`stop_token_ids` supports up to 64 tokens. Given: 65"),
        ({"stop": list("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5"),
        ({"max_tokens": 0}, "`max_tokens` must be strictly positive"),
        ({"top_logprobs": 21}, "`top_logprobs` must be >= 0 and <= 20. Given: 21"),
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        options = chat(**fields)
        check_options("Hello", options, LIMITS)
        new_tokens(1, options, LIMITS)
    assert str(refusal.value) == f"Input validation error: {message}"
