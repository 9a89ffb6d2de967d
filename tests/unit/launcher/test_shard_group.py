"""The root cause of the end of a group."""

from __future__ import annotations

import pytest

from text_generation_launcher.shard_group import RankExit, root_cause
from text_generation_proto.exit_codes import ExitCode

LOST = int(ExitCode.BUG)
"""Exit code of a shard that lost a peer."""


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([RankExit(0, -9)], RankExit(0, -9)),
        ([RankExit(0, LOST)], RankExit(0, LOST)),
        ([RankExit(0, LOST), RankExit(1, -9), RankExit(2, LOST)], RankExit(1, -9)),
        ([RankExit(2, 1), RankExit(0, LOST), RankExit(1, -15)], RankExit(2, 1)),
        ([RankExit(1, LOST), RankExit(0, LOST)], RankExit(1, LOST)),
    ],
)
def test_root_cause_is_the_first_exit_that_is_not_a_consequence(ends: list[RankExit], expected: RankExit) -> None:
    assert root_cause(ends) == expected
