"""Tables, pictures and the command: what they say, the same every time, and bad arguments in plain words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from text_generation_bench.simulator.__main__ import main
from text_generation_bench.simulator.config import POLICIES
from text_generation_bench.simulator.experiment import Experiment, run_experiment
from text_generation_bench.simulator.plots import BarChart, LineChart, svg
from text_generation_bench.simulator.report import scenario_report, table
from text_generation_bench.simulator.scenarios import SCENARIOS
from text_generation_router.scheduling.scheduler import Scheduler

SHORT = ["--machine", "cpu-135m", "--replicas", "2", "--seconds", "4"]


def test_a_table_lines_up() -> None:
    text = table(["name", "count"], [["a", "1"], ["longer", "12345"]])
    assert text == (
        "| name   | count |\n"
        "|--------|------:|\n"
        "| a      |     1 |\n"
        "| longer | 12345 |\n"
    )  # fmt: skip


def test_a_report_says_what_was_played() -> None:
    results = [run_experiment(Experiment("mix", policy, "cpu-135m", 2, 4.0, 7)) for policy in ("ours", "tgi")]
    text = scenario_report(results)
    assert "2 × cpu-135m, 4 s, seed 7" in text
    assert [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ours")].count("ours") > 1
    assert "shop" in text


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_answers_everybody(policy: str) -> None:
    result = run_experiment(Experiment("chats", policy, "cpu-135m", 2, 5.0, 1, audited=True))
    assert result.total.finished == result.total.arrived > 0


@pytest.mark.parametrize("scenario", sorted(set(SCENARIOS) - {"scale"}))
def test_every_scenario_plays_without_a_broken_rule(scenario: str) -> None:
    result = run_experiment(Experiment(scenario, "ours", "cpu-135m", 2, 4.0, 1, audited=True))
    ended = result.total.finished + result.refused + result.failed + result.left
    assert result.total.arrived == ended > 0


def test_pictures_are_well_formed_and_hold_every_name() -> None:
    bars = BarChart("a < b", {"ours": 2.0, "tgi": 1.0}, {"ours": "2", "tgi": "1"})
    lines = LineChart("over time", {"ours": [1.0, 2.0, 3.0], "tgi": []})
    drawn = svg([("row & title", (bars, lines)), ("nothing", (BarChart("none", {}, {}),))], ["ours", "tgi"])
    root = ElementTree.fromstring(drawn)
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"ours", "tgi", "a < b", "row & title"} <= set(texts)
    widths = [float(element.get("width", "0")) for element in root.iter("{http://www.w3.org/2000/svg}rect")][1:]
    assert widths[0] == pytest.approx(2 * widths[1])


def test_the_command_writes_the_same_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for name in ("one", "other"):
        arguments = [*SHORT, "--scenario", "poisson,chats", "--policies", "ours,tgi", "--out", str(tmp_path / name)]
        assert main(arguments) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != ""
    names = ["chats.svg", "overview.svg", "poisson.svg", "tables.md"]
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == names
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()
    assert (tmp_path / "one" / "tables.md").read_text() in outputs[0]


def test_another_process_gives_the_same_table() -> None:
    # Hashes of strings differ from process to process: nothing may depend on them.
    command = [sys.executable, "-m", "text_generation_bench.simulator", *SHORT, "--scenario", "mix"]
    outputs = {
        subprocess.run(command, capture_output=True, check=True, env={"PYTHONHASHSEED": seed}).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--scenario", "nonsense"], "unknown scenario 'nonsense'"),
        (["--scenario", ","], "no scenario given"),
        (["--policies", "ours,theirs"], "unknown policy 'theirs'"),
        (["--replicas", "0"], "is not a number from 1"),
        (["--replicas", "many"], "is not a number from 1"),
        (["--seconds", "nan"], "is not a number of seconds"),
        (["--seconds", "-3"], "is not a number of seconds"),
        (["--machine", "abacus"], "invalid choice"),
        (["--seed", "x"], "invalid int"),
    ],
)
def test_arguments_that_make_no_sense(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert words in capsys.readouterr().err


def test_an_output_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main([*SHORT, "--scenario", "poisson", "--out", str(tmp_path / "file")]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_a_broken_rule_has_its_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Scheduler, "requests", property(lambda _: (1,)))
    assert main([*SHORT, "--scenario", "poisson", "--policies", "ours"]) == 70
    assert "rule violated: 1 requests are still in the scheduler" in capsys.readouterr().err
