"""The source that a setting names."""

import re
from pathlib import Path

from text_generation_proto.addresses import split_host_port
from text_generation_router.discovery.dns import DnsSource
from text_generation_router.discovery.file import FileSource
from text_generation_router.discovery.source import Source, StaticSource, check_address

_SERVICE = re.compile(r"([a-z0-9][a-z0-9-]*)/([a-z0-9][a-z0-9-]*):([a-z0-9][a-z0-9-]*)")


def parse_source(text: str) -> Source:
    """Return the source that `text` names: addresses with commas between, dns://, file:// or kubernetes://.

    Raises ValueError.
    """
    kind, _, rest = text.partition("://")
    match kind:
        case "dns":
            return DnsSource(*split_host_port(check_address(rest)))
        case "file":
            if not rest.startswith("/"):
                raise ValueError(f"{text!r}: expected file:///path")
            return FileSource(Path(rest))
        case "kubernetes":
            match = _SERVICE.fullmatch(rest)
            if match is None:
                raise ValueError(f"{text!r}: expected kubernetes://namespace/service:port")
            # Loaded only where it is used: a scheduler process starts without an HTTP client.
            from text_generation_router.discovery.kubernetes import KubernetesApi, KubernetesSource

            return KubernetesSource(match[1], match[2], match[3], KubernetesApi.in_cluster())
        case _:
            return StaticSource(check_address(part.strip()) for part in text.split(",") if part.strip())
