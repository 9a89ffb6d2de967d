"""`python -m text_generation_bench.simulator`: play scenarios under several policies, print tables, write pictures.

    exit code 0     played
              1     the output could not be written
              2     the arguments make no sense
              70    the scheduler broke a rule: a bug
              130   interrupted

The tables, on standard output, are the same for the same arguments. What the scheduler's calls cost goes to standard error.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from text_generation_bench.simulator.machine import MACHINES
from text_generation_bench.simulator.play import Plan, Result, play
from text_generation_bench.simulator.plots import overview_plot, scenario_plot
from text_generation_bench.simulator.policies import POLICIES
from text_generation_bench.simulator.report import scenario_report, timing_report
from text_generation_bench.simulator.scenarios import SCENARIOS, UNASKED
from text_generation_bench.simulator.shard import BrokenRule

CANNOT_WRITE, BUG, INTERRUPTED = 1, 70, 130
MOST_REPLICAS = 4096
MOST_SECONDS = 86_400.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Play what the arguments ask for; the exit code."""
    options = _parser().parse_args(arguments)
    # Long runs hold millions of objects, hardly any of them in a cycle: looking for those is a tenth of the time.
    gc.set_threshold(200_000, 20, 100)
    try:
        return _play_all(options)
    except BrokenRule as error:
        sys.stderr.write(f"simulation: a rule was broken: {error}\n")
        return BUG
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the table has seen enough; nor is there anybody for the interpreter's last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CANNOT_WRITE
    except OSError as error:
        sys.stderr.write(f"simulation: the output cannot be written: {error}\n")
        return CANNOT_WRITE


def _play_all(options: argparse.Namespace) -> int:
    folder: Path | None = options.out
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    tables: list[str] = []
    played: list[list[Result]] = []
    for name in options.scenario:
        results = []
        for plan in _plans(options, name):
            results.append(play(plan))
            sys.stderr.write(timing_report(results[-1]))
        tables.append(scenario_report(results))
        played.append(results)
        sys.stdout.write(tables[-1] + "\n")
        sys.stdout.flush()
        if folder is not None:
            (folder / f"{name}.svg").write_text(scenario_plot(results), encoding="utf-8")
    if folder is not None:
        (folder / "tables.md").write_text("\n".join(tables), encoding="utf-8")
        (folder / "overview.svg").write_text(overview_plot(played), encoding="utf-8")
    return 0


def _plans(options: argparse.Namespace, name: str) -> list[Plan]:
    scenario = SCENARIOS[name]
    return [
        Plan(
            scenario=name,
            policy=policy,
            machine=options.machine,
            replicas=options.replicas or scenario.replicas,
            seconds=options.seconds or scenario.seconds,
            seed=options.seed,
            audited=options.check,
        )
        for policy in options.policies or scenario.policies
    ]


def _parser() -> argparse.ArgumentParser:
    lines = [f"  {name:13} {scenario.summary}" for name, scenario in SCENARIOS.items()]
    parser = argparse.ArgumentParser(
        prog="python -m text_generation_bench.simulator",
        description="Play traces through the scheduler, on replicas whose steps cost what a formula says.",
        epilog="scenarios:\n" + "\n".join(lines) + "\n\npolicies:\n  " + ", ".join(POLICIES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--scenario", type=_scenarios, default=_scenarios("all"), help="names with commas, or all (the default)"
    )
    parser.add_argument("--policies", type=_policies, help="names with commas; default: what the scenario compares")
    parser.add_argument("--machine", choices=tuple(MACHINES), default="h200-8b", help="default: %(default)s")
    parser.add_argument("--replicas", type=_replicas, help="default: the scenario's")
    parser.add_argument("--seconds", type=_seconds, help="time in which clients send; default: the scenario's")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="folder for tables.md and a picture of each scenario")
    parser.add_argument("--check", action="store_true", help="check every KV block at every step: slow")
    return parser


def _scenarios(text: str) -> list[str]:
    if text == "all":
        return [name for name in SCENARIOS if name not in UNASKED]
    return _names(text, SCENARIOS, "scenario")


def _policies(text: str) -> list[str]:
    return _names(text, POLICIES, "policy")


def _names(text: str, known: Collection[str], what: str) -> list[str]:
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"there is no {what} {name!r}")
    if not names:
        raise argparse.ArgumentTypeError(f"name a {what}")
    return names


def _replicas(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number <= MOST_REPLICAS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MOST_REPLICAS}")
    return number


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 1 <= number <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 1 to {MOST_SECONDS:.0f}")
    return number


if __name__ == "__main__":
    sys.exit(main())
