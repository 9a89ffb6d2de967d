"""Access to shards: a token on every call and, over TCP, optional mutual TLS.

A client reads the certificates when it connects, a server at each new connection, so files that change take effect
without a restart. Unix sockets carry no TLS: their mode is 0600.
"""

import ssl
from pathlib import Path
from typing import Protocol

TOKEN_KEY = "x-shard-token"
"""Metadata key of the token."""


class Access(Protocol):
    """The token of one side, and its PEM files for mutual TLS, as its settings name them; "": none."""

    shard_token: str
    shard_tls_cert: str
    shard_tls_key: str
    shard_tls_ca: str
    shard_tls_name: str


def token_metadata(access: Access | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call to a shard."""
    return ((TOKEN_KEY, access.shard_token),) if access is not None and access.shard_token else ()


def client_context(ca_file: Path | str | None) -> ssl.SSLContext:
    """Return the settings of a TLS client that trusts the authorities in `ca_file`, or the system's. Raises OSError.

    Certificates need not have all extensions of RFC 5280: private authorities leave some out. gRPC does not ask for them,
    Python does since 3.13.
    """
    context = ssl.create_default_context(cafile=ca_file)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
