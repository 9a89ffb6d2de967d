"""Fixtures and settings of all tests."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# HYPOTHESIS_PROFILE=full: more examples, as `make test-all` runs them.
settings.register_profile("ci", max_examples=40, deadline=None)
settings.register_profile("full", max_examples=300, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

if not Path("/dev/nvidiactl").exists():
    # Kernels then run in Triton's interpreter, chosen when Triton is imported, by transformers at the latest.
    os.environ.setdefault("TRITON_INTERPRET", "1")


FULL = os.environ.get("TEST_FULL") == "1" or Path("/dev/nvidiactl").exists()


def pytest_report_header() -> str:
    return f"tests marked full: {'selected' if FULL else 'deselected, TEST_FULL=1 selects them'}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests marked `full`, unless TEST_FULL=1 is set or the machine has a GPU."""
    deselected = [] if FULL else [item for item in items if item.get_closest_marker("full")]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave the objects of the collected tests out of garbage collection, and out of what tests of memory search.

    While they are collected it would take a quarter of the time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the values that tests of attacks recorded as `bar`."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    for report in reports:
        if getattr(report, "when", "") == "call":
            for name, value in report.user_properties:
                if name == "bar":
                    terminalreporter.write_line(f"{report.outcome:7} {value}")


def pytest_configure() -> None:
    """Signals mean what they mean: a suite started by nohup, or in a script's background, inherits that they are ignored,
    and so would the servers it starts, which honour that."""
    for number in (signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of SmolLM2-135M-Instruct: TGI_DEMO_MODEL, or where `make model` puts it."""
    default = Path(__file__).parents[1] / ".cache" / "models" / "SmolLM2-135M-Instruct"
    folder = Path(os.environ.get("TGI_DEMO_MODEL", default))
    if not (folder / "config.json").is_file():
        pytest.fail(f"there is no demo model in {folder}: run `make model`")
    return folder


@pytest.fixture(scope="session")
def echo_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model for the echo engine: the demo model without weights and with its 4,096 most frequent tokens.

    Each process that reads its tokenizer starts in two thirds of the time.
    """
    folder = tmp_path_factory.mktemp("echo") / demo_model.name
    shutil.copytree(demo_model, folder, ignore=shutil.ignore_patterns("*.safetensors", "tokenizer.json"))
    tokenizer = json.loads((demo_model / "tokenizer.json").read_text(encoding="utf-8"))
    model = tokenizer["model"]
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < 4096}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 4096}), encoding="utf-8")
    return folder
