"""The assignment of shards to routers: the same on each router that knows the same routers and shards.

Bounded rendezvous hashing. Each pair of router and shard has a weight; the heaviest pairs are taken first, as long as the
router has room. When a router goes, its shards are spread over the others, which keep almost all of theirs. Pure.
"""

from collections.abc import Collection, Mapping
from hashlib import blake2b


def assign(routers: Collection[str], shards: Collection[str]) -> Mapping[str, str]:
    """Return the router of each shard. No router has two shards more than another one."""
    if not routers:
        return {}
    least, with_one_more = divmod(len(shards), len(routers))
    room = dict.fromkeys(routers, least)
    owners: dict[str, str] = {}
    for _, router, shard in sorted((_weight(router, shard), router, shard) for router in routers for shard in shards):
        if shard in owners:
            continue
        if room[router] == 0 and with_one_more:
            with_one_more -= 1
        elif room[router] <= 0:
            continue
        room[router] -= 1
        owners[shard] = router
    return owners


def _weight(router: str, shard: str) -> bytes:
    """Return a number that is scattered, and the same everywhere; the smallest is the heaviest."""
    return blake2b(f"{router} {shard}".encode(), digest_size=8).digest()
