"""The limits of HTTP connections."""

from __future__ import annotations

from dataclasses import dataclass

MAX_UNREAD_TOTAL = 256_000_000
"""Bytes that all clients together may leave unread. Beyond it, the connection that owes most is closed. Each HTTP worker has
an equal part."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of HTTP connections."""

    limit: int = 4096
    """Most open connections, without the reserve."""
    headers_s: float = 10.0
    """Seconds for the headers of a request."""
    keep_alive_s: float = 75.0
    """Seconds that an idle connection is kept."""
    stall_s: float = 20.0
    """Seconds by which a client may be late in reading what it owes."""
    unread_total: int = MAX_UNREAD_TOTAL
    """Bytes that all clients together may leave unread."""
