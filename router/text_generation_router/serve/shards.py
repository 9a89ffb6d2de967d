"""The shards of a router: found, joined, and driven by one cluster."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from text_generation_common.exit_codes import CannotServe
from text_generation_common.log import log
from text_generation_common.stop_signals import StopSignals
from text_generation_common.waiting import background, unless_stopped
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.values import WarmUpLimits
from text_generation_router.audit.auditor import Auditor
from text_generation_router.config import KvEventsConfig, RouterConfig
from text_generation_router.dashboard.events import EventLog
from text_generation_router.discovery.parse import parse_source
from text_generation_router.discovery.source import Address, Source, StaticSource, known
from text_generation_router.metrics import Metrics
from text_generation_router.permits import Permits
from text_generation_router.scheduling.policy import Dispatch, Policy
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.shards.cluster import Cluster
from text_generation_router.shards.first_join import join_all, join_first
from text_generation_router.shards.join import ReplicaInfo, merge_capabilities
from text_generation_router.shards.listeners import Delivery, Receiver

QUEUED_KV_CACHES = 8
"""Default limit of queued work, in sizes of all KV caches."""


class Shards:
    """The shards that the settings name, and the routers to share them with."""

    def __init__(self, config: RouterConfig) -> None:
        """Read the settings. Raises CannotServe."""
        self._config, self._limits = config, WarmUpLimits.of(config)
        self._source = _source("shards", config.shards) if config.shards else StaticSource(config.shard_address)
        if config.peers and not config.shards:
            raise CannotServe("--peers is for routers that share the shards of --shards: it is missing")
        self._peers = _source("peers", config.peers) if config.peers else None
        self._joined: Mapping[Address, ReplicaInfo | None] = {}
        self._auditor: Auditor | None = None
        self._publishers: list[Any] = []  # that of KV events
        if config.kv_events_config:
            events = KvEventsConfig.model_validate_json(config.kv_events_config)
            if events.enable_kv_cache_events:  # imported only where it is used: it is an extra
                from text_generation_router.kv_events import KvEventsPublisher

                self._publishers.append(KvEventsPublisher(events))
        self.reached = False
        """True once a shard has answered, also if another router with other limits drives it."""
        self.known = 0
        """The number of shards that the source lists, those of other routers included."""

    async def members(self) -> AsyncIterator[frozenset[Address]]:
        """Yield the members of the source, and count them."""
        async for members in self._source.members():
            self.known = len(members)
            yield members

    async def join(self, signals: StopSignals) -> ReplicaInfo | None:
        """Connect to shards and warm them up. Return what they serve; None after a stop signal.

        The shards of --shards come and go: the first that joins will do. Those of --shard-address are all there; one that
        does not answer is left out. Raises CannotServe.
        """
        config, limits = self._config, self._limits
        if config.shards:
            joining = join_first(self._source.members(), limits, config, self._on_taken)
        else:
            joining = join_all(config.shard_address, limits, config, config.shard_connect_timeout)
        if (joined := await unless_stopped(joining, signals)) is None:
            return None
        self.reached, self._joined = True, joined
        model = merge_capabilities(joined.values())
        check_honoured(config, model)
        return model

    def _on_taken(self) -> None:
        self.reached = True
        if self._config.role == "scheduler":
            reached_file(self._config).touch()

    def cluster(
        self, model: ReplicaInfo, delivery: Delivery[Receiver] | None = None
    ) -> tuple[Cluster[Receiver], Metrics, Permits]:
        """Return a cluster without replicas, its metrics, and the permits of its requests. Raises CannotServe."""
        config = self._config
        max_input_tokens, max_total_tokens = token_limits(config, model)
        scheduler = Scheduler(policy_of(config, model.info), replicas=0, first_store=secrets.randbits(32))
        metrics = Metrics(max_input_tokens=max_input_tokens, max_total_tokens=max_total_tokens, scheduler=scheduler)
        metrics.add_names(config.metric_names, config.model_id or config.model_path)
        share = 0.001 * model.info.device.startswith("cuda") if config.audit_share is None else config.audit_share
        if share and model.info.scores_generated:
            auditor = self._auditor = Auditor(scheduler, metrics.steps, config, model.info, share)
            cluster = auditor.cluster = Cluster(scheduler, auditor, config.hang_timeout, delivery)
            cluster.on_submit = auditor.on_submit
            metrics.add_audits(auditor)
        else:
            if share:
                write = log.warning if config.audit_share else log.info
                write("no audits: the engine does not score generated tokens", engine=model.info.engine)
            cluster = Cluster(scheduler, metrics.steps, config.hang_timeout, delivery)
        metrics.add_shards(cluster, lambda: self.known)
        wait = partial(scheduler.estimated_wait, for_permit=True)
        return cluster, metrics, Permits(config.max_concurrent_requests, wait)

    async def audit(self, events: EventLog) -> None:
        """Run audits until cancelled, if there are any, with their findings among the events of the dashboard."""
        if self._auditor is not None:
            self._auditor.on_finding = events.add
            await self._auditor.run()

    async def drive(self, cluster: Cluster[Any]) -> None:
        """Drive all shards, or those that are assigned to this router."""
        async with background(*(each.run(cluster.scheduler) for each in self._publishers)):
            if self._peers is None:
                await cluster.run(known(self), self._joined, self._limits, self._config)
                return
            # Loaded only where it is used: a scheduler process starts without an HTTP client.
            from text_generation_router.discovery.peers import SharedShards

            shared = SharedShards(self, self._peers, self._config.port, self._config.peer_name)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(shared.run())
                await cluster.run(shared.members(), self._joined, self._limits, self._config)


def reached_file(config: RouterConfig) -> Path:
    """Return the file that tells HTTP workers, before they have a link, that a shard has answered."""
    return Path(f"{config.worker_socket}-reached")


def token_limits(config: RouterConfig, model: ReplicaInfo) -> tuple[int, int]:
    """Return the longest prompt, and the most prompt plus new tokens of a request: the settings, else the limits of model
    and KV cache. Raises CannotServe."""
    capacity = model.specs[0].num_tokens
    # The last new token needs no KV, but a limit larger by one token is not worth a special case.
    allowed = min(capacity, model.info.max_sequence_length)
    total = config.max_total_tokens or allowed
    longest = total - 1 if config.max_input_tokens is None else config.max_input_tokens
    if not 0 < longest < total:
        raise CannotServe(f"`max_input_tokens`({longest}) must be < `max_total_tokens`({total})")
    if total > capacity:
        raise CannotServe(f"`max_total_tokens` must be <= `max_batch_total_tokens`. Given: {total} and {capacity}")
    if total > model.info.max_sequence_length:
        raise CannotServe(
            f"`max_total_tokens`({total}) is more than the model's {model.info.max_sequence_length} positions"
        )
    return longest, total


def policy_of(config: RouterConfig, info: pb.InfoResponse) -> Policy:
    """Return the scheduling policy: settings of the same name, and those that depend on the engine."""
    names = {each.name for each in fields(Policy)} & RouterConfig.model_fields.keys()
    settings = {name: getattr(config, name) for name in names}
    return Policy(
        **settings
        | {
            "max_batch_prefill_tokens": config.max_batch_prefill_tokens or info.suggested_prefill_tokens,
            "chunk_tokens": info.suggested_chunk_tokens or None,
            "max_batch_size": min(config.max_batch_size or info.max_slots, info.max_slots),
            "target_itl_s": config.target_itl_ms / 1e3 or None,
            "dispatch": Dispatch(config.dispatch),
            "max_queued_caches": None if config.max_queued_tokens else QUEUED_KV_CACHES,
        }
    )


def check_honoured(config: RouterConfig, model: ReplicaInfo) -> None:
    """Check that the engine supports the settings. Raises CannotServe."""
    if config.prefix_cache_per_tenant and "cache_salt" in model.unsupported:
        reason = model.unsupported["cache_salt"]
        raise CannotServe(f"`prefix_cache_per_tenant` is not supported by this engine: {reason}")
    if config.kv_events_config and model.info.scheduling == pb.SCHEDULING_SELF:
        raise CannotServe("`kv_events_config`: the prefix cache of this engine is its own: it has events of its own")
    if config.prefill_replicas and not model.pool.host_cache:
        raise CannotServe(
            "`prefill_replicas` moves sequences by way of a host cache, and this model or its shards have none"
        )


def _source(flag: str, text: str) -> Source:
    """Return the source that a setting names. Raises CannotServe."""
    try:
        return parse_source(text)
    except ValueError as error:
        raise CannotServe(f"--{flag}: {error}") from error
