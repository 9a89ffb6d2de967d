"""Log records are one line in both formats, with or without a traceback."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import structlog

from text_generation_proto.logs import configure_logging
from text_generation_proto.settings import ProcessConfig


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    yield
    structlog.contextvars.clear_contextvars()
    structlog.reset_defaults()


@pytest.mark.parametrize("json_output", [False, True])
def test_a_traceback_is_part_of_its_record(json_output: bool, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(ProcessConfig(json_output=json_output), "router")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        structlog.get_logger().exception("it failed", request_id=7)
    [line] = capsys.readouterr().err.splitlines()
    assert "it failed" in line
    assert "ValueError" in line
    assert "request_id" in line
    if json_output:
        assert json.loads(line)["process"] == "router"
