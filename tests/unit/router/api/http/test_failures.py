"""What a failure's answer says beside its words: when to come again."""

from __future__ import annotations

import json

import pytest

from text_generation_router.api.http.dialects import (
    Dialect,
    anthropic_error_event,
    error_response,
    openai_error_event,
    tgi_error_event,
)
from text_generation_router.errors import (
    DeadlineExceeded,
    Draining,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    ServingError,
    Unhealthy,
)


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
def test_whoever_may_come_again_is_told_when(
    dialect: Dialect, error: ServingError, status: int, seconds: str | None
) -> None:
    response = error_response(dialect, error)
    assert response.status == status
    assert response.headers.get("retry-after") == seconds


def test_a_deadline_has_a_word_in_every_dialect() -> None:
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
