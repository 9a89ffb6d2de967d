"""Parameters that only `make test-all`, or a machine with a GPU, runs."""

from __future__ import annotations

import pytest


def full(*values: object) -> object:
    """Return a set of parameters that is marked `full`; see tests/conftest.py."""
    return pytest.param(*values, marks=pytest.mark.full)
