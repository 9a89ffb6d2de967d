"""Free TCP ports."""

from __future__ import annotations

import socket

_given: set[int] = set()


def free_port() -> int:
    """Return a port that is free now, another one at each call of this process."""
    port = 0
    while not port or port in _given:
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
    _given.add(port)
    return port
