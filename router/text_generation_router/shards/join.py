"""How a shard joins: wait until it serves, ask what it is, warm it up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import grpc

from text_generation_proto.client import ShardClient
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.values import GrammarKind
from text_generation_router.scheduling.messages import ReplicaSpec
from text_generation_router.shards.convert import grammar_kinds_from_pb


class CannotJoin(Exception):
    """The shard answers, but cannot serve as asked; one clear line."""


@dataclass(frozen=True, slots=True)
class WarmUpLimits:
    """What steps shards are to be ready for. Zero leaves the choice to the engine."""

    max_batch_prefill_tokens: int = 0
    max_batch_size: int = 0
    max_batch_total_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Joined:
    """What a shard said of itself, and the KV pool it measured."""

    info: pb.InfoResponse
    pool: pb.WarmUpResponse

    @property
    def spec(self) -> ReplicaSpec:
        """What the scheduler has to know."""
        return ReplicaSpec(
            num_slots=self.info.max_slots,
            num_blocks=self.pool.num_blocks,
            block_size=self.pool.block_size,
            self_scheduling=self.info.scheduling == pb.SCHEDULING_SELF,
            reserves_max_length=self.info.reserves_max_length,
        )

    @property
    def unsupported(self) -> Mapping[str, str]:
        """What its engine cannot honour, by the name on the wire, and why."""
        return {one.field: one.reason for one in self.info.unsupported}

    @property
    def grammar_kinds(self) -> frozenset[GrammarKind]:
        """The grammars that its engine follows."""
        return grammar_kinds_from_pb(self.info.grammar_kinds)

    def differs_from(self, other: Joined) -> str | None:
        """Why requests prepared for `other` cannot run here; None if they can."""
        for name in (
            "engine",
            "model_type",
            "vocab_size",
            "max_sequence_length",
            "block_size",
            "eos_token_ids",
            "scheduling",
            "max_top_n_tokens",
            "grammar_kinds",
        ):
            mine, others = getattr(self.info, name), getattr(other.info, name)
            if mine != others:
                return f"its {name} is {mine!r}, the other replicas' is {others!r}"
        for name, reason in self.unsupported.items():
            if name not in other.unsupported:
                return f"it does not support {name}, which the other replicas do: {reason}"
        return None


def together(replicas: Iterable[Joined | None]) -> Joined:
    """What requests are to be prepared for, so that they can run on any of these, of which there is one at least: the
    first one, and all that one or another cannot honour."""
    present = [one for one in replicas if one is not None]
    unsupported = {name: reason for one in reversed(present) for name, reason in one.unsupported.items()}
    info = pb.InfoResponse()
    info.CopyFrom(present[0].info)
    del info.unsupported[:]
    info.unsupported.extend(pb.Unsupported(field=name, reason=reason) for name, reason in unsupported.items())
    return Joined(info, present[0].pool)


async def join(client: ShardClient, limits: WarmUpLimits, address: str, timeout: float) -> Joined:
    """Wait for the shard at `address` and warm it up. Raises CannotJoin, and TimeoutError after `timeout` seconds
    without an answer."""
    await client.ready(timeout)
    try:
        info = await client.info()
        pool = await client.warm_up(
            max_batch_prefill_tokens=limits.max_batch_prefill_tokens,
            max_batch_size=min(limits.max_batch_size or info.max_slots, info.max_slots),
            max_batch_total_tokens=limits.max_batch_total_tokens,
        )
    except grpc.aio.AioRpcError as error:
        raise CannotJoin(f"the shard at {address} cannot warm up: {error.details()}") from error
    return Joined(info, pool)
