"""Images from other servers: only from hosts that the operator lists, and from public addresses.

A client could otherwise have the router send requests into its own network. Each host is resolved once, and the connection goes to
the address that was checked. Redirects are checked like the first URL.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Self

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from text_generation_router.media.headers import BadImage

FETCH_S = 10.0
"""Seconds in which an image must have arrived, redirects included."""
MAX_REDIRECTS = 3
MAX_CONNECTIONS = 64
"""Connections to other servers at a time; further images wait for one."""

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_public(address: IpAddress) -> bool:
    """Return True for an address of the public internet, and none that stands for one of IPv4 by its form."""
    if isinstance(address, ipaddress.IPv6Address) and (
        address.ipv4_mapped or address.sixtofour or address.teredo or address in _NAT64
    ):
        return False
    return address.is_global and not address.is_multicast


class Fetcher:
    """Fetches files from the hosts of a list."""

    def __init__(
        self, hosts: Collection[str], max_bytes: int, is_allowed: Callable[[IpAddress], bool] = is_public
    ) -> None:
        """`hosts`: names, with the port if it is not that of the scheme. `is_allowed`: rule for their addresses."""
        self._hosts = frozenset(host.lower() for host in hosts)
        self._max_bytes = max_bytes
        self._resolver = _Resolver(is_allowed)

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(
            resolver=self._resolver, use_dns_cache=False, limit=MAX_CONNECTIONS, force_close=True
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "text-generation-router"},
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    def allows(self, url: str) -> bool:
        """Return True if the URL is one of a listed host."""
        try:
            self._checked(URL(url))
        except (BadImage, ValueError):
            return False
        return True

    async def fetch(self, url: str) -> bytes:
        """Return the file at `url`. Raises BadImage."""
        try:
            async with asyncio.timeout(FETCH_S):
                return await self._fetch(self._checked(URL(url)))
        except TimeoutError:
            raise BadImage(f"it did not arrive within {FETCH_S:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError):  # the reason would tell about the network of the server
            raise BadImage("it cannot be fetched from its URL") from None

    async def _fetch(self, url: URL) -> bytes:
        for _ in range(1 + MAX_REDIRECTS):
            async with self._session.get(url, allow_redirects=False) as response:
                if response.status in (301, 302, 303, 307, 308) and "Location" in response.headers:
                    url = self._checked(url.join(URL(response.headers["Location"])))
                    continue
                if response.status != 200:
                    raise BadImage(f"the server of its URL answers {response.status}")
                data = bytearray()
                async for part in response.content.iter_any():
                    data += part
                    if len(data) > self._max_bytes:
                        raise too_large(self._max_bytes)
                return bytes(data)
        raise BadImage(f"its URL leads to more than {MAX_REDIRECTS} others")

    def _checked(self, url: URL) -> URL:
        """Return a URL that may be fetched. Raises BadImage."""
        if url.scheme not in ("http", "https") or not url.host or url.user or url.password:
            raise BadImage("its URL is not supported. Send a `data:` URI, or a URL of http or https")
        if str(url.host_port_subcomponent).lower() not in self._hosts:
            raise BadImage("this server does not fetch images from the host of its URL. Send it as a `data:` URI")
        self._resolver.check_literal(url.host)
        return url


class _Resolver(AbstractResolver):
    """Resolves names, and refuses those with an address that is not allowed."""

    def __init__(self, is_allowed: Callable[[IpAddress], bool]) -> None:
        self._is_allowed = is_allowed

    def check_literal(self, host: str) -> None:
        """Check a host that is an address: it is not resolved. Raises BadImage."""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return
        self._check(address)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
        results: list[ResolveResult] = []
        for kind, _, protocol, _, address in found:
            self._check(ipaddress.ip_address(address[0]))
            results.append(
                ResolveResult(
                    hostname=host,
                    host=str(address[0]),
                    port=port,
                    family=kind,
                    proto=protocol,
                    flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
                )
            )
        return results

    async def close(self) -> None:
        """Nothing is open."""

    def _check(self, address: IpAddress) -> None:
        if not self._is_allowed(address):
            raise BadImage("the host of its URL has an address that is not public")


def too_large(max_bytes: int) -> BadImage:
    """Return the error for a file above the limit."""
    return BadImage(f"its file has more than {max_bytes} bytes")
