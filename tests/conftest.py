"""Fixtures and settings of all tests."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

# HYPOTHESIS_PROFILE=full: more examples, as `make test-all` runs them.
settings.register_profile("ci", max_examples=60, deadline=None)
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


def pytest_collection_finish() -> None:
    """Leave the objects of the collected tests out of garbage collection, and out of what tests of memory search."""
    gc.collect()
    gc.freeze()


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
