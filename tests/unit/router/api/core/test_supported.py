"""What counts as asking for something that an engine may lack, and what does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.values import Sampling
from text_generation_router.api.core.extras import TGI, Extras
from text_generation_router.api.core.parameters import GenerateParameters
from text_generation_router.api.core.sampling import to_sampling
from text_generation_router.api.core.supported import _PARAMETERS, check_supported
from text_generation_router.api.openai.parameters import CHAT_NAMES, COMPLETION_NAMES
from text_generation_router.errors import InvalidRequest
from text_generation_router.request import QualityOfService, Request, RequestId

PLAIN = Request(RequestId(1), (5, 6, 7), max_new_tokens=20)
WHY = "the engine never heard of it"

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
    ("watermark", {"sampling": Sampling(watermark=True)}, "`watermark`"),
    ("seed", {"sampling": Sampling(greedy=False, seed=0)}, "`seed`"),
    ("stop_token_ids", {"stop_token_ids": (3,)}, "`stop_token_ids`"),
    ("min_new_tokens", {"min_new_tokens": 1}, "`min_tokens`"),
    ("top_n", {"top_n_tokens": 1}, "`top_n_tokens`"),
    ("prompt", {"prompt_logprobs": True}, "`decoder_input_details`"),
    ("prompt_top_n", {"prompt_top_n": 1}, "`echo` with `logprobs` above 0"),
    ("cache_salt", {"qos": QualityOfService(salt="pepper")}, "`cache_salt`"),
]


@pytest.mark.parametrize(("name", "changes", "called"), ASKED, ids=[row[0] for row in ASKED])
def test_what_is_asked_for_is_refused_by_its_name(name: str, changes: dict[str, Any], called: str) -> None:
    request = replace(PLAIN, **changes)
    with pytest.raises(InvalidRequest) as refused:
        check_supported(request, {name: WHY}, {})
    assert str(refused.value) == f"Input validation error: {called} is not supported by this engine: {WHY}"
    others = {other: WHY for other, _, _ in ASKED if other != name}
    check_supported(request, others, {})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sampling": Sampling(greedy=False, seed=None)},
        {"sampling": Sampling(seed=5)},
        {"sampling": Sampling(logit_bias_ids=(1,), logit_bias_values=(0.0,))},
        {"stop_sequences": ("a",), "ignore_eos": True},
    ],
)
def test_neutral_values_ask_for_nothing(changes: dict[str, Any]) -> None:
    check_supported(replace(PLAIN, **changes), {name: WHY for name, _, _ in ASKED}, {})


def test_what_no_client_can_ask_for_is_no_matter() -> None:
    check_supported(replace(PLAIN, **ASKED[0][1]), {"greedy": WHY, "of_tomorrow": WHY}, {})


@pytest.mark.parametrize(
    ("names", "field", "called"),
    [
        (CHAT_NAMES, "top_n", "`top_logprobs`"),
        (COMPLETION_NAMES, "top_n", "`logprobs`"),
        (COMPLETION_NAMES, "prompt", "`echo` with `logprobs`"),
    ],
)
def test_dialects_have_their_own_words(names: dict[str, str], field: str, called: str) -> None:
    changes = next(changes for name, changes, _ in ASKED if name == field)
    with pytest.raises(InvalidRequest, match=f"^Input validation error: {called} is not"):
        check_supported(replace(PLAIN, **changes), {field: WHY}, names)


def test_every_field_that_a_request_fills_can_be_refused() -> None:
    """A new field of the wire has a line in the table, or is none that a client asks for."""
    of_every_request = {"greedy", "max_new_tokens", "eos_token_ids", "logit_bias_values"}
    messages = (pb.Sampling, pb.Stopping, pb.LogprobOptions)
    fields = {field.name for message in messages for field in message.DESCRIPTOR.fields}
    assert set(_PARAMETERS) == fields - of_every_request | {"cache_salt"}
    assert {name for name, _, _ in ASKED} == set(_PARAMETERS)


def test_where_the_engine_takes_no_seeds_only_a_clients_own_is_one() -> None:
    assert to_sampling(GenerateParameters(do_sample=True), TGI, None).seed is None
    assert to_sampling(GenerateParameters(do_sample=True, seed=3), Extras(), None).seed == 3
