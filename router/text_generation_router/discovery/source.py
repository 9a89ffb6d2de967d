"""The protocol of a source of members, and the addresses it gives."""

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Protocol

from text_generation_common.log import log
from text_generation_proto.addresses import socket_path, split_host_port

Address = str
"""unix:///path or host:port; an IPv6 address in brackets."""

UNABLE = "X-Unable"
"""Header of /health/live: why the router, which lives, should be given no shards by its peers."""


class Source(Protocol):
    """The members, by one of the kinds that --shards and --peers name."""

    def members(self) -> AsyncIterator[frozenset[Address]]:
        """Yield the whole set at first and at each change, at times unchanged. It never fails, but tries again."""


class StaticSource:
    def __init__(self, addresses: Iterable[Address]) -> None:
        self._addresses = frozenset(addresses)

    async def members(self) -> AsyncIterator[frozenset[Address]]:
        yield self._addresses
        await asyncio.Event().wait()


async def known(source: Source) -> AsyncIterator[frozenset[Address] | None]:
    """Yield the members of `source`; None instead of an empty set, which may be an error of the source's."""
    async for members in source.members():
        yield members or None


def check_address(text: str) -> Address:
    """Return the address that `text` is. Raises ValueError."""
    if socket_path(text) is None:
        try:
            split_host_port(text)
        except ValueError:
            raise ValueError(f"{text!r} is not an address: expected host:port or unix:///path") from None
    return text


def of_one_family(hosts: Iterable[str]) -> list[str]:
    """Return the IPv4 addresses of `hosts`, else the IPv6 ones: a host with both is one member."""
    every = [ipaddress.ip_address(host) for host in hosts]
    return [str(host) for host in every if host.version == 4] or [str(host) for host in every]


@dataclass(slots=True)
class Trouble:
    """Logs the first of several failures of a source in a row, and its recovery."""

    source: str
    _reason: str | None = None

    def failed(self, reason: str) -> None:
        """Record a failure: the last members stay."""
        if reason != self._reason:
            log.warning("members not known: the last ones stay", source=self.source, reason=reason)
        self._reason = reason

    def answered(self) -> None:
        if self._reason is not None:
            log.info("members known again", source=self.source)
        self._reason = None
