from __future__ import annotations

import pytest

from text_generation_proto.settings import ChildConfig, parse_config


class Config(ChildConfig, cli_prog_name="tester"):
    """Settings of a process."""

    size: int = 3
    """Size."""


def test_settings_come_from_flag_then_environment_then_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_config(Config, []).size == 3
    monkeypatch.setenv("SIZE", "4")
    assert parse_config(Config, []).size == 4
    assert parse_config(Config, ["--size", "5"]).size == 5


def test_lifeline_fd_is_not_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIFELINE_FD", "9")
    assert parse_config(Config, []).lifeline_fd == -1
    assert parse_config(Config, ["--lifeline-fd", "9"]).lifeline_fd == 9


def test_of_ignores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIZE", "4")
    monkeypatch.setenv("LOG_LEVEL", "debug")
    assert Config.of() == Config.of(size=3, log_level="info")


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (
            ["--size", "many"],
            "--size (or SIZE): Input should be a valid integer, unable to parse string as an integer, not 'many'",
        ),
        (["--siz", "1"], "unrecognized arguments: --siz 1; did you mean --size?"),
        (["--size"], "argument --size: expected one argument"),
    ],
)
def test_invalid_settings_are_one_line_and_exit_code_2(
    argv: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse_config(Config, argv)
    assert exit_.value.code == 2
    assert capsys.readouterr().err == f"tester: error: {error}\n"
