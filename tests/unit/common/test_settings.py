from __future__ import annotations

import pytest

from text_generation_common.command_line import parse_config
from text_generation_common.settings import ChildConfig


def test_lifeline_fd_is_not_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIFELINE_FD", "9")
    assert parse_config(ChildConfig, []).lifeline_fd == -1
    assert parse_config(ChildConfig, ["--lifeline-fd", "9"]).lifeline_fd == 9
