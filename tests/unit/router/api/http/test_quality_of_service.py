"""Quality of service: the earliest deadline, the winning priority, the salt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from api_settings import api_settings

from text_generation_router.api.anthropic.schemas import MessagesBody
from text_generation_router.api.core.settings import Limits
from text_generation_router.api.http.caller import Caller, TieredFields, quality_of_service, read_caller
from text_generation_router.api.http.keys import ANYONE, KeyHolder
from text_generation_router.api.openai.responses_schemas import ResponsesBody
from text_generation_router.api.openai.schemas import ChatBody
from text_generation_router.errors import InvalidRequest
from text_generation_router.request import Priority, QualityOfService, TenantId
from text_generation_router.scheduling.queue import due_time
from text_generation_router.web.bodies import validate
from text_generation_router.web.body_errors import InvalidBody

LIMITS = Limits(1, 1, 1, 10, 20)
CONFIG = api_settings(LIMITS).config
NOW = 1000.0
CALLER = Caller(NOW, KeyHolder(max_priority=Priority.SYSTEM))


def fields(**values: object) -> TieredFields:
    return validate(values, TieredFields)


def test_the_default_has_no_deadline_and_no_salt() -> None:
    assert quality_of_service(CALLER, CONFIG) == quality_of_service(CALLER, CONFIG, fields()) == QualityOfService()


def test_headers_are_passed_on() -> None:
    caller = Caller(NOW, CALLER.holder, TenantId("a"), Priority.BULK, NOW + 1, NOW + 2, NOW + 3)
    assert quality_of_service(caller, CONFIG) == QualityOfService(
        TenantId("a"), Priority.BULK, "", NOW + 1, NOW + 2, NOW + 3
    )


def test_the_earliest_deadline_of_header_and_bodies_counts() -> None:
    for given in ([1.0, 2.0, 3.0], [3.0, 1.0, 2.0], [2.0, 3.0, 1.0]):
        caller = replace(CALLER, queue_by=NOW + given[0], end_by=NOW + given[0])
        bodies = [fields(queue_timeout=seconds, timeout=seconds) for seconds in given[1:]]
        service = quality_of_service(caller, CONFIG, *bodies)
        assert (service.queue_by, service.end_by) == (NOW + 1, NOW + 1)


def test_the_operators_timeouts_are_defaults_and_bounds() -> None:
    config = api_settings(LIMITS, queue_timeout=5.0, request_timeout=60.0).config
    for asked, due in (({}, (5, 60)), ({"queue_timeout": 9, "timeout": 99}, (5, 60)), ({"timeout": 1}, (5, 1))):
        service = quality_of_service(CALLER, config, fields(**asked))
        assert (service.queue_by, service.end_by) == (NOW + due[0], NOW + due[1])
    later = quality_of_service(replace(CALLER, end_by=NOW + 100), config)
    assert later.end_by == NOW + 60


@pytest.mark.parametrize("name", ["queue_timeout", "timeout"])
@pytest.mark.parametrize("value", [0, -0.0, -1, 1e7 + 1, float("inf"), float("nan")])
def test_an_invalid_timeout_is_refused_by_name(name: str, value: float) -> None:
    asked = TieredFields.model_construct(**{name: value})
    with pytest.raises(InvalidRequest, match=f"`{name}` must be > 0 and <= 10000000 seconds. Given: "):
        quality_of_service(CALLER, CONFIG, asked)


@pytest.mark.parametrize(
    "wrong",
    [
        {"timeout": "1"},
        {"timeout": True},
        {"queue_timeout": [1]},
        {"priority": 1.5},
        {"priority": 2**63},
        {"cache_salt": 1},
        {"cache_salt": "a" * 257},
        {"service_tier": 1},
    ],
)
def test_wrong_types_are_refused_with_the_body(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidBody, match=next(iter(wrong))) as refused:
        validate(wrong, TieredFields)
    assert refused.value.status == 422


@pytest.mark.parametrize(
    ("asked", "priority"),
    [
        ({"priority": -7}, Priority.INTERACTIVE),
        ({"priority": 0}, Priority.DEFAULT),
        ({"priority": 7}, Priority.BULK),
        ({"service_tier": "priority"}, Priority.INTERACTIVE),
        ({"service_tier": "flex"}, Priority.BULK),
        ({"service_tier": "auto"}, Priority.DEFAULT),
        ({"service_tier": "default"}, Priority.DEFAULT),
        ({"service_tier": "standard_only"}, Priority.DEFAULT),
        ({"service_tier": "of tomorrow"}, Priority.DEFAULT),
        ({"service_tier": None}, Priority.DEFAULT),
        ({"service_tier": "flex", "priority": 0}, Priority.DEFAULT),
    ],
)
def test_the_body_sets_the_priority(asked: dict[str, Any], priority: Priority) -> None:
    assert quality_of_service(CALLER, CONFIG, fields(**asked)).priority is priority


def test_the_header_wins_over_the_body_and_the_inner_body_over_the_outer() -> None:
    caller = replace(CALLER, priority=Priority.DEFAULT)
    assert quality_of_service(caller, CONFIG, fields(priority=-1)).priority is Priority.DEFAULT
    inner, outer = fields(priority=1), fields(priority=-1)
    assert quality_of_service(CALLER, CONFIG, inner, outer).priority is Priority.BULK
    assert quality_of_service(CALLER, CONFIG, fields(), outer).priority is Priority.INTERACTIVE


@pytest.mark.parametrize("most", list(Priority))
def test_a_caller_gets_at_most_the_priority_of_its_key(most: Priority) -> None:
    holder = KeyHolder(max_priority=most)
    for asked in Priority:
        caller = Caller(NOW, holder, priority=asked, first_token_by=NOW + 0.1)
        given = quality_of_service(caller, CONFIG)
        assert given.priority is max(most, asked)
        # A target for the first token is no way around it.
        assert due_time(given, NOW) >= due_time(QualityOfService(priority=most), NOW)
    assert quality_of_service(Caller(NOW, holder), CONFIG, fields(priority=-1)).priority is max(
        most, Priority.INTERACTIVE
    )


def test_tenants_are_separated_by_default_with_several_keys() -> None:
    def separated(limits: Limits = LIMITS, **values: object) -> bool:
        return api_settings(limits, **values).separate_tenants

    assert [separated(api_key=keys) for keys in ((), ("a",), ("a", "a"), ("a", "b"))] == [False, False, False, True]
    assert separated(prefix_cache_per_tenant=True)
    assert not separated(api_key=("a", "b"), prefix_cache_per_tenant=False)
    assert not separated(replace(LIMITS, unsupported={"cache_salt": "no"}), api_key=("a", "b"))


def test_the_salt_is_that_of_the_body() -> None:
    for tenant in ("a", "b"):
        caller = replace(CALLER, tenant=TenantId(tenant))
        assert quality_of_service(caller, CONFIG, fields(cache_salt="s")).salt == "s"
        assert quality_of_service(caller, CONFIG).salt == ""
    assert quality_of_service(CALLER, CONFIG, fields(cache_salt="inner"), fields(cache_salt="outer")).salt == "inner"


def test_separated_tenants_never_have_the_same_salt() -> None:
    salts = {
        quality_of_service(
            replace(CALLER, tenant=TenantId(tenant)), CONFIG, fields(cache_salt=salt), separate_tenants=True
        ).salt
        for tenant in ("", "a", "ab")
        for salt in (None, "b", "a\0", "\0a")
    }
    assert len(salts) == 12


@pytest.mark.parametrize(
    ("headers", "body", "job"),
    [
        ({"x-claude-code-session-id": "s", "session_id": "t"}, {"prompt_cache_key": "k"}, "s"),
        ({"session_id": "codex"}, {"user": "u"}, "codex"),
        ({"x-opencode-session": "o"}, {}, "o"),
        ({"x-session-id": ""}, {"prompt_cache_key": "k", "session_id": "s", "user": "u"}, "k"),
        ({}, {"session_id": "s", "user": "u"}, "s"),
        ({}, {"user": "u"}, "u"),
        ({"x-session-id": "a" * 300 + "b" * 256}, {}, "b" * 256),
        ({}, {}, ""),
    ],
)
def test_the_job_is_the_session_or_the_user(headers: dict[str, str], body: dict[str, str], job: str) -> None:
    caller = read_caller(headers, NOW, ANYONE)
    for asked in (ChatBody(messages=[], **body), ResponsesBody(input="", **body)):
        assert quality_of_service(caller, CONFIG, asked).job == job


def test_anthropic_names_its_user_in_the_metadata() -> None:
    body = MessagesBody.model_validate({"messages": [], "max_tokens": 1, "metadata": {"user_id": "u"}})
    assert quality_of_service(CALLER, CONFIG, body).job == "u"
    odd = MessagesBody.model_validate({"messages": [], "max_tokens": 1, "metadata": {"user_id": 7}})
    assert quality_of_service(CALLER, CONFIG, odd).job == ""
