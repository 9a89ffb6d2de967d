"""The assignment of shards to routers, for any routers and shards."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from text_generation_router.discovery.assign import assign

ROUTERS = st.sets(st.text(max_size=5), min_size=1, max_size=6)
SHARDS = st.sets(st.text(max_size=5), max_size=24)


@given(ROUTERS, SHARDS, st.randoms())
def test_each_shard_has_one_router_and_no_router_has_two_more_than_another(
    routers: set[str], shards: set[str], random: object
) -> None:
    owners = assign(routers, shards)
    assert owners.keys() == shards
    counts = Counter(dict.fromkeys(routers, 0))
    counts.update(owners.values())
    assert counts.keys() == routers
    assert max(counts.values()) - min(counts.values()) <= 1
    random.shuffle(names := sorted(shards))  # type: ignore[attr-defined]
    assert assign(sorted(routers, reverse=True), names) == owners, "it depends on the sets alone"


@given(ROUTERS, SHARDS)
def test_of_two_routers_the_one_that_stays_keeps_its_shards(routers: set[str], shards: set[str]) -> None:
    first, *others = sorted(routers)
    if len(others) == 1:
        before = assign(routers, shards)
        assert all(assign([first], shards)[shard] == first for shard in shards if before[shard] == first)


def test_few_shards_move_when_a_router_or_a_shard_goes() -> None:
    """Beside those of the router that went, of 16 shards of 4 routers about one in ten of the other 12."""
    shards = [f"10.0.0.{number}:50051" for number in range(16)]
    routers_moved = shards_moved = 0
    for trial in range(100):
        routers = [f"router-{trial}-{number}:3000" for number in range(4)]
        before = assign(routers, shards)
        after = assign(routers[1:], shards)
        routers_moved += sum(before[each] not in (routers[0], after[each]) for each in shards)
        after = assign(routers, shards[1:])
        shards_moved += sum(before[each] != after[each] for each in shards[1:])
    assert routers_moved <= 200
    assert shards_moved <= 200
