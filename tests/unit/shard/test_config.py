"""Settings of a shard: contradictions are one-line errors."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from text_generation_shard.config import ShardConfig

MEETING = "unix:///tmp/group"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"world_size": 2}, "`world_size` is 2: `group_address` must be unix:///path"),
        ({"world_size": 2, "group_address": "127.0.0.1:5"}, "`group_address` must be unix:///path"),
        ({"rank": 1}, "`rank`(1) must be < `world_size`(1)"),
        ({"rank": 2, "world_size": 2, "group_address": MEETING}, "`rank`(2) must be < `world_size`(2)"),
    ],
)
def test_an_invalid_rank_is_rejected(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError) as error:
        ShardConfig.of(**settings)
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"replica": 3}, "shard-3"),
        ({"replica": 3, "rank": 0, "world_size": 2, "group_address": MEETING}, "shard-3-rank-0"),
        ({"rank": 1, "world_size": 2, "group_address": MEETING}, "shard-0-rank-1"),
    ],
)
def test_the_process_name_has_replica_and_rank(settings: dict[str, object], name: str) -> None:
    assert ShardConfig.of(**settings).process_name == name
