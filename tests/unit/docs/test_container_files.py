"""The files and commands that start containers give the server time to drain before it is killed."""

from __future__ import annotations

import re
import shlex
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

from text_generation_launcher.config import read_config

ROOT = Path(__file__).parents[3]
CONTAINER = ROOT / "deploy" / "container"
MARGIN = 15
"""Seconds in which the launcher ends children that exceed their timeouts."""


def seconds_to_stop(arguments: list[str]) -> float:
    """Return the time that a launcher with these arguments takes at most, from SIGTERM on."""
    config = read_config(arguments, {})
    router = 0.0 if config.parts == "shards" else config.shutdown_delay + config.graceful_termination_timeout
    return router + config.drain_timeout + config.shutdown_timeout + MARGIN


def test_the_quadlet_unit_stops_in_time() -> None:
    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(CONTAINER / "text-generation.container")
    (timeout,) = re.findall(r"--stop-timeout=(\d+)", unit["Container"]["PodmanArgs"])
    assert int(timeout) >= seconds_to_stop(shlex.split(unit["Container"]["Exec"]))
    assert int(unit["Service"]["TimeoutStopSec"]) > int(timeout), "systemd waits for Podman"


def test_the_compose_file_stops_in_time() -> None:
    (service,) = yaml.safe_load((CONTAINER / "compose.yaml").read_text(encoding="utf-8"))["services"].values()
    assert int(service["stop_grace_period"].removesuffix("s")) >= seconds_to_stop(service["command"])
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]


PAGE = (ROOT / "docs" / "containers.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", re.findall(r"^\$ podman run --detach((?:.*\\\n)*.*)", PAGE, re.MULTILINE))
def test_a_command_of_the_page_stops_in_time(command: str) -> None:
    options, image, arguments = re.split(r"(?<= )text-generation:(\S+)", command.replace("\\\n", " "))
    words = [word for word in shlex.split(arguments) if word not in ("--shard-token-file", "/secrets/shard-token")]
    if image == "router":  # its entry is the router itself, without a launcher
        words = ["--parts=router", "--model-id=model", *words[words.index("--shards") :]]
    (timeout,) = re.findall(r"--stop-timeout (\d+)", options)
    assert int(timeout) >= seconds_to_stop([*words, "--shard-token=token"])
