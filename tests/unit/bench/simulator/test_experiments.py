"""The simulator's command, its tables and plots."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from text_generation_bench.simulator.__main__ import main
from text_generation_bench.simulator.config import POLICIES
from text_generation_bench.simulator.experiment import Experiment, run_experiment
from text_generation_bench.simulator.plots import BarChart, LineChart, svg
from text_generation_bench.simulator.scenarios import SCENARIOS

SHORT = ["--machine", "cpu-135m", "--replicas", "2", "--seconds", "4"]


@pytest.mark.parametrize(
    ("scenario", "policy"),
    [("chats", policy) for policy in sorted(POLICIES)]
    + [(name, "ours") for name in sorted(set(SCENARIOS) - {"scale"})],
)
def test_experiments_violate_no_rule(scenario: str, policy: str) -> None:
    # Sessions of agents are few, and end later; tenants send many requests.
    seconds = {"agents": 25.0, "tenants": 1.5}.get(scenario, 4.0)
    result = run_experiment(Experiment(scenario, policy, "cpu-135m", 2, seconds, 1, audited=True))
    ended = result.total.finished + result.rejected + result.failed + result.left
    assert result.total.arrived == ended > 0
    assert result.rejected + result.failed + result.left == 0 or scenario != "chats"


def test_plots_are_well_formed_and_contain_every_name() -> None:
    bars = BarChart("a < b", {"ours": 2.0, "tgi": 1.0}, {"ours": "2", "tgi": "1"})
    lines = LineChart("over time", {"ours": [1.0, 2.0, 3.0], "tgi": []})
    drawn = svg([("row & title", (bars, lines)), ("nothing", (BarChart("none", {}, {}),))], ["ours", "tgi"])
    root = ElementTree.fromstring(drawn)
    texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"ours", "tgi", "a < b", "row & title"} <= texts
    widths = [float(element.get("width", "0")) for element in root.iter("{http://www.w3.org/2000/svg}rect")][1:]
    assert widths[0] == pytest.approx(2 * widths[1])


def test_command_writes_reproducible_tables_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for name in ("first", "second"):
        arguments = [*SHORT, "--scenario", "poisson,chats", "--policies", "ours,tgi", "--out", str(tmp_path / name)]
        assert main(arguments) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != ""
    names = ["chats.svg", "overview.svg", "poisson.svg", "tables.md"]
    assert sorted(path.name for path in (tmp_path / "first").iterdir()) == names
    for name in names:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    assert (tmp_path / "first" / "tables.md").read_text() in outputs[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scenario", "nonsense"], "unknown scenario 'nonsense'"),
        (["--scenario", ","], "no scenario given"),
        (["--policies", "ours,theirs"], "unknown policy 'theirs'"),
        (["--replicas", "many"], "is not a number from 1"),
        (["--seconds", "nan"], "is not a number of seconds"),
    ],
)
def test_invalid_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err
