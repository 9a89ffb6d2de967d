"""Which of several ends broke a group."""

from __future__ import annotations

import pytest

from text_generation_launcher.group import End, cause
from text_generation_proto.process import ExitCode

LOST = int(ExitCode.BUG)
"""How a shard ends that loses a peer."""


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([End(0, -9)], End(0, -9)),
        ([End(0, LOST)], End(0, LOST)),
        ([End(0, LOST), End(1, -9), End(2, LOST)], End(1, -9)),
        ([End(2, 1), End(0, LOST), End(1, -15)], End(2, 1)),
        ([End(1, LOST), End(0, LOST)], End(1, LOST)),
    ],
)
def test_the_first_end_that_follows_from_no_other_is_the_cause(ends: list[End], expected: End) -> None:
    assert cause(ends) == expected
