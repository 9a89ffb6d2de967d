"""Members by DNS: the addresses of one name, as of a headless service."""

import asyncio
import socket
from collections.abc import AsyncIterator

from text_generation_proto.addresses import join_host_port
from text_generation_router.discovery.source import Address, Trouble, of_one_family

LOOK_UP_EVERY_S = 2.0
"""Seconds between two look-ups of a name by `dns://`. An answer comes from the resolver's cache for as long as its TTL says."""
_NO_SUCH_NAME = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}


class DnsSource:
    """Looks a name up again and again."""

    def __init__(self, name: str, port: int, every_s: float = LOOK_UP_EVERY_S) -> None:
        self._name, self._port, self._every_s = name, port, every_s

    async def members(self) -> AsyncIterator[frozenset[Address]]:
        trouble = Trouble(f"dns://{self._name}")
        loop = asyncio.get_running_loop()
        while True:
            try:
                found = await loop.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:
                trouble.failed(str(error))
                if isinstance(error, socket.gaierror) and error.errno in _NO_SUCH_NAME:
                    yield frozenset()
            else:
                trouble.answered()
                hosts = of_one_family({str(sockaddr[0]) for *_, sockaddr in found})
                yield frozenset(join_host_port(host, self._port) for host in hosts)
            await asyncio.sleep(self._every_s)
