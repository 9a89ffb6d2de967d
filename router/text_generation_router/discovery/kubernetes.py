"""Members by Kubernetes: the endpoints of a service, from its EndpointSlices.

    list ──► whole set ──► watch from the version of the list ──► whole set after each event
      ▲                      │ ends, is refused, says 410 Gone, or has lasted RELIST_S
      └──────────────────────┘

Each list replaces what is known, so events that were lost matter for RELIST_S at most, as does a watch that went silent.
Conditions of endpoints are not read: a shard is ready only once a router drives it, and one that stops says so itself.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from text_generation_common.log import log
from text_generation_proto.access import client_context
from text_generation_proto.addresses import join_host_port
from text_generation_router.discovery.source import Address, Trouble, check_address, of_one_family

RELIST_S = 60.0
"""Seconds for which `kubernetes://` watches before it lists again: a watch that went silent is noticed by then."""
LIST_TIMEOUT_S = 10.0
"""Seconds for the API server of `kubernetes://` to answer."""
RETRY_S = 0.5
"""Seconds from a failed answer of the API server, or the early end of a watch, to the next list."""
MAX_EVENT_BYTES = 1 << 23
"""Longest event of a watch, in bytes. A slice of 1000 endpoints has some hundred thousand."""
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder of the pod's service account."""


_Slices = dict[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class KubernetesApi:
    """Access to the API server: the token file is read for each request, because tokens expire and are replaced."""

    url: str
    token_file: Path
    ca_file: Path | None
    """The only certificates that may sign the server's; None: plain HTTP."""

    @classmethod
    def in_cluster(cls) -> "KubernetesApi":
        """Return the access that each pod has. Raises ValueError outside a pod."""
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ValueError("kubernetes:// works in a pod only: KUBERNETES_SERVICE_HOST is not set")
        return cls(f"https://{join_host_port(host, int(port))}", ACCOUNT / "token", ACCOUNT / "ca.crt")

    def connector(self) -> aiohttp.TCPConnector:
        """Return a connector that trusts `ca_file` alone. Raises OSError."""
        return aiohttp.TCPConnector(ssl=False if self.ca_file is None else client_context(self.ca_file))

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a request. Raises OSError."""
        return {"Authorization": f"Bearer {self.token_file.read_text().strip()}", "Accept": "application/json"}


class KubernetesSource:
    def __init__(
        self, namespace: str, service: str, port: str, api: "KubernetesApi", relist_s: float = RELIST_S
    ) -> None:
        """`port` is a number, or the name that the slices give to one."""
        self._url = f"{api.url}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._selector = {"labelSelector": f"kubernetes.io/service-name={service}"}
        self._name = f"kubernetes://{namespace}/{service}"
        self._port = port
        self._api = api
        self._relist_s = relist_s

    async def members(self) -> AsyncIterator[frozenset[Address]]:
        trouble = Trouble(self._name)
        while True:
            try:
                # A new session for each list: it reads the certificates again and shares no connection with a dead watch.
                async with aiohttp.ClientSession(connector=self._api.connector()) as session:
                    slices, version = await self._list(session)
                    trouble.answered()
                    yield self._addresses(slices)
                    async for event in self._watch(session, version):
                        _apply(event, slices)
                        yield self._addresses(slices)
            except (aiohttp.ClientError, OSError, ValueError) as error:
                trouble.failed(str(error) or type(error).__name__)
                await asyncio.sleep(RETRY_S)

    async def _list(self, session: aiohttp.ClientSession) -> tuple[_Slices, str]:
        """Return the slices by name, and the version of the list."""
        timeout = aiohttp.ClientTimeout(total=LIST_TIMEOUT_S)
        request = session.get(self._url, params=self._selector, headers=self._api.headers, timeout=timeout)
        async with request as response:
            body = orjson.loads(await _checked(response).read())
        try:
            return {item["metadata"]["name"]: item for item in body["items"] or ()}, body["metadata"]["resourceVersion"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a list of EndpointSlices: {error!r}") from error

    async def _watch(self, session: aiohttp.ClientSession, version: str) -> AsyncIterator[Mapping[str, Any]]:
        """Yield the events after `version` for `relist_s`. Raises ValueError."""
        end = asyncio.get_running_loop().time() + self._relist_s
        options = {"watch": "1", "resourceVersion": version, "timeoutSeconds": str(int(self._relist_s) + 1)}
        timeout = aiohttp.ClientTimeout(sock_connect=LIST_TIMEOUT_S, sock_read=self._relist_s)
        request = session.get(
            self._url,
            params=self._selector | options,
            headers=self._api.headers,
            timeout=timeout,
            read_bufsize=MAX_EVENT_BYTES // 2,  # a line may be twice as long
        )
        async with request as response:
            lines = _checked(response).content
            while True:
                try:
                    async with asyncio.timeout_at(end):  # around the reading alone: a yield may take any time
                        line = await lines.readline()
                except TimeoutError:
                    return
                if not line:
                    raise ValueError("the watch ended early")
                event = orjson.loads(line)
                if not isinstance(event, dict) or event.get("type") == "ERROR":
                    raise ValueError(f"the watch failed: {line[:200]!r}")
                yield event

    def _addresses(self, slices: _Slices) -> frozenset[Address]:
        hosts: dict[int, set[str]] = {}
        for each in slices.values():
            try:
                for port, host in self._endpoints(each):
                    hosts.setdefault(port, set()).add(host)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                log.error("an EndpointSlice is left out", source=self._name, reason=repr(error))
        found = set()
        for port, of_port in hosts.items():
            for host in of_one_family(of_port):
                with suppress(ValueError):
                    found.add(check_address(join_host_port(host, port)))
        return frozenset(found)

    def _endpoints(self, slice_: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
        """Yield (port, host) of each endpoint. Raises KeyError, TypeError, ValueError, AttributeError."""
        if slice_.get("addressType") == "FQDN":
            raise ValueError("its addresses are names")
        if self._port.isdigit():
            port = int(self._port)
        else:
            named = {each.get("name"): each["port"] for each in slice_.get("ports") or ()}
            if self._port not in named:
                return  # of another set of ports
            port = int(named[self._port])
        for endpoint in slice_.get("endpoints") or ():
            # Kubernetes gives each endpoint one address.
            yield port, str(endpoint["addresses"][0])


def _checked(response: aiohttp.ClientResponse) -> aiohttp.ClientResponse:
    if response.status != 200:
        raise ValueError(f"the API server answers {response.status} {response.reason}")
    return response


def _apply(event: Mapping[str, Any], slices: _Slices) -> None:
    """Change `slices` as `event` says. Raises ValueError."""
    try:
        item = event["object"]
        if event["type"] in ("ADDED", "MODIFIED"):
            slices[item["metadata"]["name"]] = item
        elif event["type"] == "DELETED":
            slices.pop(item["metadata"]["name"], None)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not an event of an EndpointSlice: {error!r}") from error
