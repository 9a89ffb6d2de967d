"""`python -m text_generation_bench.simulator`: run scenarios under several policies, print tables, write plots.

    exit code 0     success
              1     the output could not be written
              2     invalid arguments
              70    the scheduler violated a rule: a bug
              130   interrupted

The tables, on standard output, are reproducible. The processor time of the scheduler's calls goes to standard error.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from text_generation_bench.simulator.config import POLICIES
from text_generation_bench.simulator.cost_model import MACHINES
from text_generation_bench.simulator.experiment import Experiment, ExperimentResult, run_experiment
from text_generation_bench.simulator.plots import overview_plot, scenario_plot
from text_generation_bench.simulator.report import scenario_report, timing_report
from text_generation_bench.simulator.scenarios import ONLY_BY_NAME, SCENARIOS
from text_generation_bench.simulator.shard import RuleViolation

CANNOT_WRITE, BUG, INTERRUPTED = 1, 70, 130
MAX_REPLICAS = 4096
MAX_SECONDS = 86_400.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the simulations of the command line; return the exit code."""
    options = _parser().parse_args(arguments)
    # Long runs hold millions of objects, hardly any in a cycle: the default garbage collection takes a tenth of the time.
    gc.set_threshold(200_000, 20, 100)
    try:
        return _run_all(options)
    except RuleViolation as error:
        sys.stderr.write(f"simulation: rule violated: {error}\n")
        return BUG
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the table is gone. The interpreter must not fail when it flushes standard output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CANNOT_WRITE
    except OSError as error:
        sys.stderr.write(f"simulation: the output cannot be written: {error}\n")
        return CANNOT_WRITE


def _run_all(options: argparse.Namespace) -> int:
    folder: Path | None = options.out
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    tables: list[str] = []
    all_results: list[list[ExperimentResult]] = []
    for name in options.scenario:
        results = []
        for experiment in _experiments(options, name):
            results.append(run_experiment(experiment))
            sys.stderr.write(timing_report(results[-1]))
        tables.append(scenario_report(results))
        all_results.append(results)
        sys.stdout.write(tables[-1] + "\n")
        sys.stdout.flush()
        if folder is not None:
            (folder / f"{name}.svg").write_text(scenario_plot(results), encoding="utf-8")
    if folder is not None:
        (folder / "tables.md").write_text("\n".join(tables), encoding="utf-8")
        (folder / "overview.svg").write_text(overview_plot(all_results), encoding="utf-8")
    return 0


def _experiments(options: argparse.Namespace, name: str) -> list[Experiment]:
    scenario = SCENARIOS[name]
    return [
        Experiment(
            scenario=name,
            policy=policy,
            machine=options.machine,
            replicas=options.replicas or scenario.replicas,
            seconds=options.seconds or scenario.seconds,
            seed=options.seed,
            audited=options.check,
            prefill_replicas=options.prefill_replicas,
        )
        for policy in options.policies or scenario.policies
    ]


def _parser() -> argparse.ArgumentParser:
    lines = [f"  {name:13} {scenario.summary}" for name, scenario in SCENARIOS.items()]
    parser = argparse.ArgumentParser(
        prog="python -m text_generation_bench.simulator",
        description="Simulate traffic through the scheduler, on replicas whose step durations follow a formula.",
        epilog="scenarios:\n" + "\n".join(lines) + "\n\npolicies:\n  " + ", ".join(POLICIES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--scenario", type=_scenarios, default=_scenarios("all"), help="comma-separated names, or all (the default)"
    )
    parser.add_argument(
        "--policies", type=_policies, help="comma-separated names; default: those that the scenario compares"
    )
    parser.add_argument("--machine", choices=tuple(MACHINES), default="h200-8b", help="default: %(default)s")
    parser.add_argument("--replicas", type=_replicas, help="default: that of the scenario")
    parser.add_argument(
        "--prefill-replicas",
        type=_replicas,
        default=1,
        help="those of `two-roles` that compute prompts; default: %(default)s",
    )
    parser.add_argument("--seconds", type=_seconds, help="time in which clients send; default: that of the scenario")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="folder for tables.md and the plots")
    parser.add_argument("--check", action="store_true", help="check every KV block at every step (slow)")
    return parser


def _scenarios(text: str) -> list[str]:
    if text == "all":
        return [name for name in SCENARIOS if name not in ONLY_BY_NAME]
    return _names(text, SCENARIOS, "scenario")


def _policies(text: str) -> list[str]:
    return _names(text, POLICIES, "policy")


def _names(text: str, known: Collection[str], what: str) -> list[str]:
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"unknown {what} {name!r}")
    if not names:
        raise argparse.ArgumentTypeError(f"no {what} given")
    return names


def _replicas(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number <= MAX_REPLICAS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MAX_REPLICAS}")
    return number


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 1 <= number <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 1 to {MAX_SECONDS:.0f}")
    return number


if __name__ == "__main__":
    sys.exit(main())
