"""gRPC channel settings of both sides, which have to match.

A server closes the connection (GOAWAY, `too_many_pings`) of a client that pings more often than the server allows, and every call
on it fails. The server here allows a ping every 10 s and counts no strikes; the client pings every 30 s.
"""

from __future__ import annotations

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""Far above the largest message: prompt log-probabilities for a full batch of the longest prompts."""

_LENGTHS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)

CLIENT_OPTIONS: tuple[tuple[str, int], ...] = (
    *_LENGTHS,
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
    *_LENGTHS,
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # Two servers on one port would each get half the calls.
    ("grpc.so_reuseport", 0),
)
