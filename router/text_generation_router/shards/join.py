"""Joining of a shard: wait until it serves, read its description, warm it up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import grpc

from text_generation_proto import convert
from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.client import ShardClient
from text_generation_proto.description import difference
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.values import GrammarKind, WarmUpLimits
from text_generation_router.scheduling.messages import ReplicaSpec


class CannotJoin(Exception):
    """The shard answers but cannot serve as configured; one clear line."""


class ShardEnded(CannotJoin):
    """The shard ended while it joined. It may be restarted."""


class ShardTaken(Exception):
    """Another router drives the shard."""


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """A shard's description of itself and its KV pool."""

    info: pb.InfoResponse
    pool: pb.WarmUpResponse

    @property
    def specs(self) -> Sequence[ReplicaSpec]:
        """The capacity of each rank."""
        ranks = max(1, self.info.ranks)
        whole = ReplicaSpec(
            num_slots=self.info.max_slots // ranks,
            num_blocks=self.pool.num_blocks // ranks,
            block_size=self.pool.block_size,
            self_scheduling=self.info.scheduling == pb.SCHEDULING_SELF,
            reserves_max_length=self.info.reserves_max_length,
            keeps_states=self.info.keeps_states,
            adapters=tuple(self.info.adapters),
            max_loras=self.info.max_loras,
            tokens_per_step=max(1, self.info.max_tokens_per_step),
            further_groups=tuple(
                CacheGroup(group.num_blocks, group.window or None, is_state=group.state, host_blocks=group.host_blocks)
                for group in self.pool.further_groups
            ),
            host_cache=self.pool.host_cache,
            host_blocks=self.pool.host_blocks,
            ranks=ranks,
        )
        return [replace(whole, rank=rank) for rank in range(ranks)]

    @property
    def unsupported(self) -> Mapping[str, str]:
        """Unsupported capabilities: wire name → reason."""
        return {capability.field: capability.reason for capability in self.info.unsupported}

    @property
    def grammar_kinds(self) -> frozenset[GrammarKind]:
        """The kinds that this version knows."""
        known = convert.GRAMMAR_KINDS_FROM_PB
        return frozenset(known[kind] for kind in self.info.grammar_kinds if kind in known)


def merge_capabilities(replicas: Iterable[ReplicaInfo | None]) -> ReplicaInfo:
    """Return the description for which requests are prepared, so that they can run on any of `replicas`.

    It is the first one, with the unsupported capabilities of all, and the fewest images. At least one replica must be given.
    """
    present = [replica for replica in replicas if replica is not None]
    unsupported = {name: reason for replica in reversed(present) for name, reason in replica.unsupported.items()}
    info = pb.InfoResponse()
    info.CopyFrom(present[0].info)
    info.max_images = min(replica.info.max_images for replica in present)
    del info.unsupported[:]
    info.unsupported.extend(pb.Unsupported(field=name, reason=reason) for name, reason in unsupported.items())
    return ReplicaInfo(info, present[0].pool)


async def join(
    client: ShardClient, limits: WarmUpLimits, address: str, timeout: float, expected: ReplicaInfo | None = None
) -> ReplicaInfo:
    """Wait for the shard at `address` and warm it up, unless it does not match `expected`.

    Raises CannotJoin, ShardTaken, and TimeoutError after `timeout` seconds without an answer.
    """
    info = None
    try:
        await client.ready(timeout)
        info = await client.info()
        if expected is not None and (different := difference(info, expected.info)):
            raise CannotJoin(f"the shard at {address} serves something else: {different}")
        pool = await client.warm_up(
            max_batch_prefill_tokens=limits.max_batch_prefill_tokens,
            max_batch_size=min(limits.max_batch_size, info.max_slots),
            max_batch_total_tokens=limits.max_batch_total_tokens,
        )
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION and info is not None and info.rank == 0:
            raise ShardTaken("a router with other limits drives it") from error
        cannot = ShardEnded if error.code() is grpc.StatusCode.UNAVAILABLE else CannotJoin
        raise cannot(f"the shard at {address} cannot warm up: {error.details()}") from error
    return ReplicaInfo(info, pool)
