"""Errors in each dialect: status, body, headers, stream events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from text_generation_router.api.http.dialects import (
    Dialect,
    anthropic_error_event,
    error_response,
    openai_error_event,
    tgi_error_event,
)
from text_generation_router.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    GenerationFailed,
    GrammarFailed,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    NotSupported,
    Overloaded,
    ServingError,
    TemplateError,
    ThreadNotSupported,
    Unauthorized,
    Unhealthy,
    error_classes,
)
from text_generation_router.web.body_errors import BodyTooLarge, InvalidBody

OPEN = {422: 400, 424: 500}
"""Statuses of OpenAI's and Anthropic's routes where TGI's differ."""


def body(dialect: Dialect, error: ServingError) -> Any:  # noqa: ANN401
    written = error_response(dialect, error).body
    assert isinstance(written, bytes)
    return json.loads(written)


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize(
    ("error", "status", "seconds"),
    [
        (Overloaded(), 429, "1"),
        (Overloaded(retry_after_s=0.0), 429, "1"),
        (Overloaded(retry_after_s=-3.0), 429, "1"),
        (Overloaded(retry_after_s=1.01), 429, "2"),
        (Overloaded(retry_after_s=42.0), 429, "42"),
        (Overloaded(retry_after_s=1e9), 429, "3600"),
        (Overloaded(retry_after_s=float("inf")), 429, "3600"),
        (Overloaded(retry_after_s=float("nan")), 429, "3600"),
        (Draining(), 503, "1"),
        (Unhealthy(), 503, "5"),
        (DeadlineExceeded("too late"), 408, None),
        (GenerationFailed("numerics"), 424, None),
        (InvalidRequest("no"), 422, None),
    ],
)
def test_status_and_retry_after(dialect: Dialect, error: ServingError, status: int, seconds: str | None) -> None:
    response = error_response(dialect, error)
    assert response.status == (status if dialect is Dialect.TGI else OPEN.get(status, status))
    assert response.headers.get("retry-after") == seconds
    assert response.headers.get("x-should-retry") == ("false" if status == 408 else None)


INVALID = "invalid_request_error"


@pytest.mark.parametrize(
    ("error", "kind", "param", "code", "anthropic"),
    [
        (InvalidRequest("no"), INVALID, None, "invalid_value", INVALID),
        (InvalidRequest("`top_p` must be >= 0.0"), INVALID, "top_p", "invalid_value", INVALID),
        (InvalidRequest("at most 3 tools", param="tools"), INVALID, "tools", "invalid_value", INVALID),
        (NotSupported("`n` is not supported here"), INVALID, "n", "unsupported_parameter", INVALID),
        (InvalidBody("no"), INVALID, None, "invalid_value", INVALID),
        (InvalidBody("no", param="messages[0].role", code="invalid_type"), INVALID, "messages[0].role", "invalid_type", INVALID),
        (TemplateError("no"), INVALID, "messages", "template_error", INVALID),
        (ModelNotFound("The model `a` does not exist"), INVALID, "model", "model_not_found", "not_found_error"),
        (BodyTooLarge(), INVALID, None, "payload_too_large", "request_too_large"),
        (Unauthorized(), INVALID, None, "invalid_api_key", "authentication_error"),
        (NotFound("no"), INVALID, None, "not_found", "not_found_error"),
        (Overloaded(), "rate_limit_error", None, "overloaded", "rate_limit_error"),
        (Draining(), "server_error", None, "overloaded", "overloaded_error"),
        (Unhealthy(), "server_error", None, "healthcheck", "overloaded_error"),
        (GrammarFailed("no"), INVALID, None, "grammar_error", INVALID),
        (GenerationFailed("no"), "server_error", None, "generation", "api_error"),
    ],
)  # fmt: skip
def test_openai_and_anthropic_have_their_own_types(
    error: ServingError, kind: str, param: str | None, code: str, anthropic: str
) -> None:
    answer = body(Dialect.OPENAI, error)["error"]
    assert (answer["type"], answer["param"], answer["code"]) == (kind, param, code)
    assert answer["http_status_code"] == OPEN.get(error.status, error.status)
    assert body(Dialect.ANTHROPIC, error)["error"] == {"type": anthropic, "message": str(error)}


def test_a_prompt_that_is_too_long_is_known_by_code_and_words() -> None:
    text = "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 20. Given: 30 `inputs` tokens"
    error = ContextLengthExceeded(text.partition(": ")[2], tokens="30", limit=15, context=20, param="messages")
    assert body(Dialect.TGI, error) == {"error": text, "error_type": "validation"}
    answer = body(Dialect.OPENAI, error)["error"]
    known = "This model's maximum context length is 20 tokens. Input tokens exceed the configured limit of 15 tokens"
    assert answer["message"] == f"{text}. {known}"
    assert (answer["type"], answer["param"], answer["code"]) == (INVALID, "messages", "context_length_exceeded")
    answer = body(Dialect.ANTHROPIC, error)["error"]
    assert answer == {
        "type": "invalid_request_error",
        "message": f"prompt is too long: 30 tokens > 15 maximum. {text}",
    }

    at_least = ContextLengthExceeded("", tokens="at least 30", limit=15, context=20)
    assert body(Dialect.ANTHROPIC, at_least)["error"]["message"].startswith(
        "prompt is too long: 30 tokens > 15 maximum"
    )


def test_anthropics_clients_learn_that_threads_are_not_stored() -> None:
    assert body(Dialect.ANTHROPIC, ThreadNotSupported())["error"]["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }


def test_a_deadline_has_its_own_type_in_every_dialect() -> None:
    error = DeadlineExceeded("it waited too long")
    text = "Request timed out: it waited too long"
    assert json.loads(tgi_error_event(error).removeprefix(b"data: ")) == {"error": text, "error_type": "timeout"}
    first, done, _ = openai_error_event(error).split(b"\n\n")
    assert done == b"data: [DONE]"
    assert json.loads(first.removeprefix(b"data: "))["error"] == {
        "message": text,
        "type": "timeout",
        "param": None,
        "code": "timeout",
        "http_status_code": 408,
    }
    event, data = anthropic_error_event(error).removesuffix(b"\n\n").split(b"\n")
    assert event == b"event: error"
    assert json.loads(data.removeprefix(b"data: ")) == {
        "type": "error",
        "error": {"type": "timeout_error", "message": text},
    }


def test_every_error_has_a_status_a_type_and_a_default_text() -> None:
    assert len(list(error_classes())) > 20
    for error in error_classes():
        assert 400 <= error.status < 600
        assert error.error_type
        assert str(error()) == error.prefix + error.message
