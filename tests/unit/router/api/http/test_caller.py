"""Tenant, priority and deadlines from request headers, and the refusal of invalid ones."""

from __future__ import annotations

import re

import pytest
from api_settings import api_keys
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from text_generation_router.api.http.caller import HEADERS, Caller, read_caller
from text_generation_router.api.http.keys import ApiKeys, KeyHolder
from text_generation_router.errors import InvalidRequest
from text_generation_router.request import Priority

ANYONE = api_keys(trusted=True)
NOW = 1000.0
TRUSTED = KeyHolder(max_priority=Priority.INTERACTIVE, trusted=True)


def caller(keys: ApiKeys = ANYONE, /, **headers: str) -> Caller:
    given = CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()})
    holder = keys.holder(given)
    assert holder is not None
    return read_caller(given, NOW, holder)


def test_without_headers_there_are_only_defaults() -> None:
    assert caller() == Caller(NOW, TRUSTED)


@pytest.mark.parametrize(
    ("keys", "headers", "tenant"),
    [
        (ANYONE, {"X-LLM-D-Inference-Fairness-Id": "team a"}, "team a"),
        (ANYONE, {"x-gateway-inference-fairness-id": "b"}, "b"),
        (ANYONE, {"x-gateway-inference-fairness-id": "b", "x-llm-d-inference-fairness-id": "a"}, "a"),
        (api_keys(), {"x-llm-d-inference-fairness-id": "a"}, ""),
        (api_keys("only"), {"x-api-key": "only"}, ""),
        (api_keys("only"), {"x-api-key": "only", "x-llm-d-inference-fairness-id": "a"}, "a"),
    ],
)
def test_a_header_names_the_tenant_if_its_caller_is_trusted(
    keys: ApiKeys, headers: dict[str, str], tenant: str
) -> None:
    assert caller(keys, **headers).tenant == tenant


@pytest.mark.parametrize("tenant", ["a" * 129, "naïve", "a\tb", "a\x7f", "\udcff"])
def test_an_invalid_tenant_name_is_refused(tenant: str) -> None:
    with pytest.raises(InvalidRequest, match="`x-llm-d-inference-fairness-id` must have at most 128 characters"):
        caller(x_llm_d_inference_fairness_id=tenant)
    assert caller(x_llm_d_inference_fairness_id="a" * 128).tenant == "a" * 128


def test_with_several_keys_the_key_is_the_tenant_and_the_header_is_ignored() -> None:
    keys = api_keys("first", "second")
    first, second = (
        caller(keys, x_api_key=key, x_llm_d_inference_fairness_id="somebody else").tenant for key in ("first", "second")
    )
    assert first != second
    assert first == caller(keys, Authorization="Bearer first").tenant
    assert not {first, second} & {"", "first", "second", "somebody else"}


@pytest.mark.parametrize("priority", list(Priority))
def test_each_priority_has_a_name(priority: Priority) -> None:
    for word in (priority.name.lower(), priority.name.title()):
        assert caller(x_smg_priority=word).priority is priority


@pytest.mark.parametrize("word", ["", "urgent", "0", "x" * 1000])
def test_an_unknown_priority_is_refused(word: str) -> None:
    with pytest.raises(InvalidRequest, match="`x-smg-priority` must be one of `system`, `interactive`") as refused:
        caller(x_smg_priority=word)
    assert len(str(refused.value)) < 200


def test_each_header_sets_its_deadline() -> None:
    read = caller(x_slo_ttft_ms="1500", x_queue_timeout_ms="250.5", x_request_timeout_ms="60000")
    assert (read.first_token_by, read.queue_by, read.end_by) == (NOW + 1.5, NOW + 0.2505, NOW + 60)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("1H", 3600), ("2M", 120), ("10S", 10), ("500m", 0.5), ("20000000u", 20), ("99999999n", 0.099999999)],
)
def test_grpc_timeout_limits_the_whole_response(given: str, seconds: float) -> None:
    assert caller(grpc_timeout=given).end_by == pytest.approx(NOW + seconds)
    assert caller(grpc_timeout=given).queue_by is None


def test_the_earliest_of_several_deadlines_counts() -> None:
    assert caller(grpc_timeout="10S", x_request_timeout_ms="9000").end_by == NOW + 9
    assert caller(grpc_timeout="8S", x_request_timeout_ms="9000").end_by == NOW + 8
    assert caller(x_slo_ttft_ms="20", x_llm_d_slo_ttft_ms="10").first_token_by == NOW + 0.01


@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-llm-d-slo-ttft-ms", "x-queue-timeout-ms", "x-request-timeout-ms"])
@pytest.mark.parametrize(
    "value", ["", "0", "0.0", "-1", "+1", "nan", "inf", "1e3", "1_000", "0x10", "١", "1s", "10000000001", "9" * 400]
)
def test_an_invalid_timeout_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(InvalidRequest, match=f"header `{name}` must be a number of milliseconds") as refused:
        caller(**{name: value})
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("value", ["", "0S", "1", "S", "1s", "-1S", "1.5S", "123456789n", "99999999H", "1 S", "١S"])
def test_an_invalid_grpc_timeout_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest, match="header `grpc-timeout` must be up to 8 digits"):
        caller(grpc_timeout=value)


def test_the_target_for_itl_is_not_read() -> None:
    assert caller(x_llm_d_slo_tpot_ms="10") == Caller(NOW, TRUSTED)


@given(
    st.dictionaries(st.sampled_from(HEADERS), st.text(max_size=200) | st.from_regex(re.compile(r"\A\d+[a-zA-Z]?\Z")))
)
def test_any_header_is_read_or_refused(headers: dict[str, str]) -> None:
    try:
        read = read_caller(headers, NOW, TRUSTED)
    except InvalidRequest:
        return
    assert len(read.tenant) <= 128
    assert all(at is None or NOW <= at <= NOW + 1e7 for at in (read.first_token_by, read.queue_by, read.end_by))
