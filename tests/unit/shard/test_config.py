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
        ({"world_size": 2, "group_address": "here"}, "`group_address` must be unix:///path"),
        ({"rank": 1}, "`rank`(1) must be < `world_size`(1)"),
        ({"rank": 2, "world_size": 2, "group_address": MEETING}, "`rank`(2) must be < `world_size`(2)"),
        *(
            ({"address": address}, f"other machines reach {address}: give --shard-tls-cert")
            for address in ("0.0.0.0:50051", "[::]:50051", "10.1.2.3:50051", "shard.example:50051")
        ),
    ],
)
def test_contradictions_are_refused(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError) as error:
        ShardConfig.of(**settings)
    assert problem in str(error.value)


def test_other_machines_reach_a_shard_with_tls_or_on_request() -> None:
    for address in ("127.0.0.1:50051", "[::1]:50051", "localhost:50051", "unix:///tmp/s"):
        ShardConfig.of(address=address)
    ShardConfig.of(address="0.0.0.0:50051", insecure=True)
    ShardConfig.of(address="0.0.0.0:50051", shard_tls_cert="c", shard_tls_key="k", shard_tls_ca="a")


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
