"""Capacity: the KV caches of the replicas that there are."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from text_generation_router.scheduling.kv_cache import KVCache
from text_generation_router.scheduling.messages import ReplicaSpec
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.replica_scheduler import ReplicaScheduler


def block_usage(caches: Iterable[KVCache]) -> dict[str, tuple[int, int]]:
    """Return the KV blocks in use, and all, of each group of caches, by name."""
    usage: dict[str, tuple[int, int]] = {}
    for cache in caches:
        for name, (used, size) in cache.usage.items():
            all_used, all_blocks = usage.get(name, (0, 0))
            usage[name] = all_used + used, all_blocks + size
    return usage


def kv_usage(caches: Iterable[KVCache]) -> float:
    """Return the share of KV blocks in use in the fullest group."""
    return max((used / max(1, size) for used, size in block_usage(caches).values()), default=0.0)


def room_in_use(replica: ReplicaScheduler, policy: Policy) -> float:
    """Return the share of the slots or of the KV blocks of a group in use, whichever is largest: 0 to 1."""
    slots = min(replica.spec.num_slots, policy.max_batch_size)
    blocks = max(used / max(1, size) for used, size in replica.cache.usage.values())
    return max(replica.occupied_slots / slots, blocks)


class Capacity:
    """The last specs of all replicas, lost ones included. Of removed ones the last stays until another replica joins."""

    def __init__(self) -> None:
        self._specs: dict[int, ReplicaSpec] = {}
        self._expected: set[int] = set()
        """Replicas that have not joined yet."""
        self._removed: int | None = None

    def added(self, replica: int) -> None:
        """Expect a replica, which may hold requests of any size."""
        self._expected.add(replica)

    def joined(self, replica: int, spec: ReplicaSpec) -> None:
        self._expected.discard(replica)
        if self._removed is not None:
            self._specs.pop(self._removed, None)
            self._removed = None
        self._specs[replica] = spec

    def set_adapter(self, name: str, replicas: Collection[int]) -> Mapping[int, ReplicaSpec]:
        """Note that these replicas hold a LoRA adapter, and no others do; return the specs of all."""
        for number, spec in self._specs.items():
            others = tuple(each for each in spec.adapters if each != name)
            self._specs[number] = replace(spec, adapters=(*others, name) if number in replicas else others)
        return self._specs

    def removed(self, replica: int) -> None:
        """Forget a replica, unless it is the last one whose spec is known."""
        self._expected.discard(replica)
        if len(self._specs) > 1:
            self._specs.pop(replica, None)
        elif replica in self._specs:
            self._removed = replica

    def fits(self, prompt_tokens: int, max_new_tokens: int, adapter: str = "") -> bool:
        """Return True if a request of this size could run alone on a replica that holds its adapter."""
        return any(spec.fits(prompt_tokens + max_new_tokens - 1, adapter) for spec in self._specs.values())

    def may_fit(self, prompt_tokens: int, max_new_tokens: int, adapter: str = "") -> bool:
        """Return True if `fits`, or if a replica that has not joined yet may hold it."""
        return bool(self._expected) or self.fits(prompt_tokens, max_new_tokens, adapter)

    def queue_limit(self, policy: Policy) -> int | None:
        """Return the most tokens of work that may wait; None: no limit."""
        if policy.max_queued_caches is None:
            return policy.max_queued_tokens
        return policy.max_queued_caches * sum(spec.num_tokens for spec in self._specs.values())

    @property
    def adapters(self) -> Collection[str]:
        """The LoRA adapters of all replicas, in the order of their flags."""
        return dict.fromkeys(name for spec in self._specs.values() for name in spec.adapters)

    @property
    def known(self) -> bool:
        """True after the first replica joined."""
        return bool(self._specs)

    @property
    def self_scheduling(self) -> bool:
        """True if the engines schedule for themselves."""
        return any(spec.self_scheduling for spec in self._specs.values())

    @property
    def block_size(self) -> int:
        """Tokens per KV block; 0 before the first replica joined."""
        return next((spec.block_size for spec in self._specs.values()), 0)
