from __future__ import annotations

import pytest

from text_generation_common.command_line import parse_config
from text_generation_common.help import help_page
from text_generation_common.options import options_by_topic
from text_generation_common.settings import ChildConfig, ProcessConfig
from text_generation_launcher.config import LauncherConfig
from text_generation_router.config import RouterConfig
from text_generation_shard.config import ShardConfig

COMMANDS = pytest.mark.parametrize("config", [LauncherConfig, RouterConfig, ShardConfig])


@COMMANDS
def test_the_help_of_a_command_has_each_flag_and_variable_under_a_topic(
    config: type[ProcessConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as exit_:
        parse_config(config, ["--no-such-flag", "--help"])
    assert exit_.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    words = {word.strip(",[];") for line in lines for word in line.split()}
    for topic, options in options_by_topic(config).items():
        assert topic.value in lines
        for option in options.values():
            assert {option.flag, option.variable or option.flag} <= words


def test_the_help_of_a_word_has_the_whole_text_of_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Use SHARD_TOKEN in the environment" not in help_page(ShardConfig)
    page = help_page(ShardConfig, "token")
    assert "Use SHARD_TOKEN in the environment" in " ".join(page.split())
    assert "--shard-token" in page
    assert "--device" not in page
    with pytest.raises(SystemExit):
        parse_config(ShardConfig, ["--help", "nonsense"])
    assert capsys.readouterr().err == (
        "text-generation-shard: error: --help nonsense: no flag and no topic has that name\n"
    )


@COMMANDS
def test_each_setting_has_one_topic(config: type[ProcessConfig]) -> None:
    assert sorted(name for options in options_by_topic(config).values() for name in options) == sorted(
        config.model_fields
    )


@COMMANDS
def test_an_option_without_a_placeholder_is_a_switch(config: type[ProcessConfig]) -> None:
    options = [option for options in options_by_topic(config).values() for option in options.values()]
    switches = [option for option in options if not option.placeholder]
    model = ["--model-id", "m"] if config is LauncherConfig else []
    for flags in ([each.flag for each in switches], [each.negation for each in switches]):
        parse_config(config, [*model, *flags])
    valued = next(option for option in options if option.placeholder)
    with pytest.raises(SystemExit):
        parse_config(config, [*model, valued.flag])


def test_lifeline_fd_is_not_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIFELINE_FD", "9")
    assert parse_config(ChildConfig, []).lifeline_fd == -1
    assert parse_config(ChildConfig, ["--lifeline-fd", "9"]).lifeline_fd == 9
