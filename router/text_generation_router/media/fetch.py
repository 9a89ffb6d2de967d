"""Images from other servers: only from hosts that the operator lists, and from public addresses.

A client could otherwise have the router send requests into its own network. The address is checked when the connection is made to
it, however the host was named. Redirects are checked like the first URL.

Answers are read by an event loop of their own: one in a million chunks or interim responses would hold up the streams of others.
"""

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Callable, Collection, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
from yarl import URL

from text_generation_router.media.headers import BadImage

FETCH_S = 10.0
"""Seconds in which an image must have arrived, redirects included."""
MAX_URL = 4096
"""Characters of a URL. To parse a million takes a second, in which no stream goes on."""
MAX_REDIRECTS = 3
MAX_CONNECTIONS = 64
"""Connections to other servers at a time; further images wait for one."""

T = TypeVar("T")
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_public(address: IpAddress) -> bool:
    """Return True for an address of the public internet, and none that stands for one of IPv4 by its form."""
    if isinstance(address, ipaddress.IPv6Address) and (
        address.sixtofour or address.teredo or address not in _GLOBAL_UNICAST
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
        self._is_allowed = is_allowed

    async def __aenter__(self) -> Self:
        if self._hosts:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="images by URL", daemon=True)
            self._thread.start()
            self._session = await self._beside(self._open())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._hosts:
            await self._beside(self._session.close())
            await self._beside(self._loop.shutdown_default_executor())
            self._loop.call_soon_threadsafe(self._loop.stop)
            await asyncio.to_thread(self._thread.join)
            self._loop.close()

    async def _beside(self, work: Coroutine[Any, Any, T]) -> T:
        """Do work of a session on its loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _open(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(socket_factory=self._socket, limit=MAX_CONNECTIONS, force_close=True)
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "text-generation-router"},
            auto_decompress=False,
        )

    def allows(self, url: str) -> bool:
        """Return True if the URL is one of a listed host."""
        if not self._hosts:
            return False
        try:
            self._checked(URL(url))
        except (BadImage, ValueError):
            return False
        return True

    async def fetch(self, url: str, hold: Callable[[int], None]) -> bytes:
        """Return the file at `url`. `hold` is called before so many bytes more are kept, and may raise. Raises BadImage."""
        if len(url) > MAX_URL:
            raise BadImage(f"its URL has more than {MAX_URL} characters")
        try:
            async with asyncio.timeout(FETCH_S):
                return await self._fetch(self._checked(URL(url)), hold)
        except TimeoutError:
            raise BadImage(f"it did not arrive within {FETCH_S:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError):  # the reason would tell about the network of the server
            raise BadImage("it cannot be fetched from its URL") from None

    async def _fetch(self, url: URL, hold: Callable[[int], None]) -> bytes:
        for _ in range(1 + MAX_REDIRECTS):
            response = await self._beside(self._get(url))
            try:
                if response.status in (301, 302, 303, 307, 308) and "Location" in response.headers:
                    url = self._checked(url.join(URL(response.headers["Location"])))
                    continue
                if response.status != 200:
                    raise BadImage(f"the server of its URL answers {response.status}")
                data = bytearray()
                while part := await self._beside(response.content.readany()):
                    if len(data) + len(part) > self._max_bytes:
                        raise too_large(self._max_bytes)
                    hold(len(part))
                    data += part
                return bytes(data)
            finally:
                self._loop.call_soon_threadsafe(response.close)
        raise BadImage(f"its URL leads to more than {MAX_REDIRECTS} others")

    async def _get(self, url: URL) -> aiohttp.ClientResponse:
        return await self._session.get(url, allow_redirects=False)

    def _checked(self, url: URL) -> URL:
        """Return a URL that may be fetched. Raises BadImage."""
        if url.scheme not in ("http", "https") or not url.host or url.user or url.password:
            raise BadImage("its URL is not supported. Send a `data:` URI, or a URL of http or https")
        if str(url.host_port_subcomponent).lower() not in self._hosts:
            raise BadImage("this server does not fetch images from the host of its URL. Send it as a `data:` URI")
        return url

    def _socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        """Return a socket that is about to be connected to an address. Raises OSError."""
        family, kind, protocol, _, target = address
        if not self._is_allowed(ipaddress.ip_address(target[0])):
            raise PermissionError("the address is not public")
        return socket.socket(family, kind, protocol)


def too_large(max_bytes: int) -> BadImage:
    """Return the error for a file above the limit."""
    return BadImage(f"its file has more than {max_bytes} bytes")
