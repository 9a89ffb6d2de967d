"""The shards of one of several routers, which share nothing but the names of all routers and shards.

    peers source ──► routers ── less those that do not answer, reach no shard, or stop ──┐
    shards source ──► shards ────────────────────────────────────────────────────────────┴─► assign ──► the shards of this router

Routers may disagree for a while. A shard serves one router at a time, so what two routers want goes to the one that has it
until it lets go, its last one only for another: see `shards.member`.
"""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp

from text_generation_common.log import log
from text_generation_proto.addresses import host_of, join_host_port
from text_generation_router.discovery.assign import assign
from text_generation_router.discovery.source import UNABLE, Address, Source

PROBE_EVERY_S = 0.5
"""Seconds between two probes of a peer: GET /health/live."""
REFUSALS = 2
"""Refused or broken probes in a row after which a peer is gone: its process ended."""
SILENCE_S = 4.0
"""Seconds without an answer after which a peer is gone: its host vanished, or it hangs."""


@dataclass(slots=True, eq=False)
class SharedShards:
    shards: Source
    peers: Source
    port: int
    name: Address = ""
    """The address of this router among `peers`; by default that of `port` at this machine."""
    _known: frozenset[Address] | None = None
    _routers: frozenset[Address] | None = None
    _absent: dict[Address, str] = field(default_factory=dict)
    """The peers that get no shards, and why."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Follow shards and peers, and probe these, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_shards())
            probes: dict[Address, asyncio.Task[None]] = {}
            async for routers in self.peers.members():
                self._routers = routers
                others = routers - {self._own_name(routers)}
                for peer in probes.keys() - others:
                    probes.pop(peer).cancel()
                    self._absent.pop(peer, None)
                for peer in others - probes.keys():
                    self._absent[peer] = "it has not answered yet"
                    probes[peer] = tasks.create_task(self._probe(peer))
                self._changed.set()

    async def members(self) -> AsyncIterator[frozenset[Address] | None]:
        """Yield the shards of this router at each change; None while no shard is known."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._known is None or self._routers is None:
                continue
            if not self._known:
                yield None
                continue
            me = self._own_name(self._routers)
            owners = assign(self._routers - self._absent.keys() | {me}, self._known)
            yield frozenset(shard for shard, router in owners.items() if router == me)

    async def _follow_shards(self) -> None:
        async for shards in self.shards.members():
            self._known = shards
            self._changed.set()

    def _own_name(self, routers: frozenset[Address]) -> Address:
        """Return the name of this router. One that is not listed yet counts itself in."""
        if not self.name:
            mine = (each for each in sorted(routers) if is_here(each, self.port))
            self.name = next(mine, "")
            if self.name:
                log.info("found among the routers", name=self.name)
        return self.name or join_host_port(socket.gethostname(), self.port)

    async def _probe(self, peer: Address) -> None:
        """Record whether `peer` can drive shards."""
        timeout = aiohttp.ClientTimeout(total=SILENCE_S / 2)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            refusals, answered_at = 0, time.monotonic()
            while True:
                try:
                    async with session.get(f"http://{peer}/health/live") as response:
                        await response.read()
                    refusals, answered_at = 0, time.monotonic()
                    self._set_absent(peer, response.headers.get(UNABLE, ""))
                except TimeoutError:
                    pass
                except (aiohttp.ClientError, OSError, ValueError):
                    refusals += 1
                if refusals >= REFUSALS or time.monotonic() - answered_at >= SILENCE_S:
                    self._set_absent(peer, "it does not answer")
                await asyncio.sleep(PROBE_EVERY_S)

    def _set_absent(self, peer: Address, reason: str) -> None:
        """Record why a peer gets no shards; "": it gets some."""
        if reason == self._absent.get(peer, ""):
            return
        if reason:
            log.warning("a router gets no shards", peer=peer, reason=reason)
            self._absent[peer] = reason
        else:
            log.info("a router gets shards", peer=peer)
            del self._absent[peer]
        self._changed.set()


def is_here(address: Address, port: int) -> bool:
    """Return True if `address` is `port` at an IP address of this machine."""
    if not address.endswith(f":{port}"):
        return False
    host = host_of(address)
    with (
        suppress(OSError),
        socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        probe.bind((host, 0))
        return True
    return False
