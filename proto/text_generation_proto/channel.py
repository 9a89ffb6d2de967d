"""gRPC channel settings of both sides, which have to match.

A server closes the connection (GOAWAY, `too_many_pings`) of a client that pings more often than the server allows, and every call
on it fails. The server here allows a ping every 10 s and counts no strikes; the client pings every 30 s. The server pings too: a
client that is stopped, or lost with its host, loses its session within SERVER_PING_S + SERVER_PING_TIMEOUT_S.
"""

from pathlib import Path

import grpc

from text_generation_proto.access import Access
from text_generation_proto.addresses import socket_path

MAX_MESSAGE_BYTES = 16 << 20
"""Longest message that shard and router receive. Larger orders and reports are sent in parts (parts.py)."""

SERVER_PING_S = 4
"""Seconds without a byte from a client after which the server pings it."""
SERVER_PING_TIMEOUT_S = 4
"""Seconds for its answer, and for the acknowledgement of what the server sent; then the connection is closed."""

SESSION_OPEN = (("x-session", "open"),)
"""Initial metadata of a Run stream that the shard serves."""

_LENGTH = ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)

CLIENT_OPTIONS: tuple[tuple[str, int], ...] = (
    _LENGTH,
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # The default backoff grows to two minutes; a restarting shard is back in seconds.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Unix sockets must not go through an HTTP proxy configured in the environment.
    ("grpc.enable_http_proxy", 0),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    _LENGTH,
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", SERVER_PING_S * 1000),
    ("grpc.keepalive_timeout_ms", SERVER_PING_TIMEOUT_S * 1000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # Bytes of a call that are read before its handler asks for them: 64 kB, and no more on a fast connection.
    ("grpc.http2.bdp_probe", 0),
    # Two servers on one port would each get half the calls.
    ("grpc.so_reuseport", 0),
)


def open_channel(address: str, access: Access | None) -> grpc.aio.Channel:
    """Return a channel to the shard at `address`; without TLS if `access` is None.

    Raises OSError if a certificate cannot be read.
    """
    if access is None or not access.shard_tls_cert or socket_path(address) is not None:
        return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
    ca, key, cert = read_certificates(access)
    name = (("grpc.ssl_target_name_override", access.shard_tls_name),) if access.shard_tls_name else ()
    credentials = grpc.ssl_channel_credentials(ca, key, cert)
    return grpc.aio.secure_channel(address, credentials, options=(*CLIENT_OPTIONS, *name))


def read_certificates(access: Access) -> tuple[bytes, bytes, bytes]:
    """Return the contents of the CA, key and certificate files. Raises OSError."""
    names = access.shard_tls_ca, access.shard_tls_key, access.shard_tls_cert
    ca, key, cert = (Path(name).read_bytes() for name in names)
    return ca, key, cert
