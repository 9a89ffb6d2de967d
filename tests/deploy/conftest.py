"""A table of figures, printed after the tests of a heavy target."""

from __future__ import annotations

import pytest

FIGURES = pytest.StashKey[list[tuple[str, str]]]()


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> list[tuple[str, str]]:
    """Rows of the table: append a name and a value."""
    return request.config.stash.setdefault(FIGURES, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for name, value in config.stash.get(FIGURES, []):
        terminalreporter.write_line(f"{name:<52} {value}")
