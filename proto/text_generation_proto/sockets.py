"""Addresses of shards; their unix sockets: claimed before listening, removed after stopping.

The launcher puts its shards' sockets in a private folder that it only names. `claim_socket` creates the folder and
`remove_socket` removes it when it is empty. It thus exists only while a process lives that will remove it, and nothing
stays in the file system even if the launcher is killed.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from pathlib import Path

PRIVATE_FOLDER_PREFIX = "tgi-sockets-"
"""Prefix of the name of a folder that holds only the sockets of one launcher's shards."""


_HOST_PORT = re.compile(
    r"(?:\[(?P<ip_v6>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|(?P<host>[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_.])?)):(?P<port>[0-9]{1,5})",
    re.ASCII,
)


class SocketInUse(Exception):
    """The path of a socket cannot be used: it is taken by a running server, another user or another kind of file, or its
    folder cannot be created."""


def socket_path(address: str) -> Path | None:
    """Return the path of a unix:///path address; None for host:port."""
    return Path(address.removeprefix("unix://")) if address.startswith("unix://") else None


def split_host_port(address: str) -> tuple[str, int]:
    """Return the host, without brackets, and the port of a host:port address. Raises ValueError."""
    match = _HOST_PORT.fullmatch(address)
    if match is None or not 0 < int(match["port"]) < 1 << 16:
        raise ValueError(f"{address!r} is not host:port")
    return match["ip_v6"] or match["host"], int(match["port"])


def host_of(address: str) -> str:
    """Return the host of an address; 127.0.0.1 for a unix socket."""
    return "127.0.0.1" if socket_path(address) is not None else address.rpartition(":")[0].strip("[]")


def join_host_port(host: str, port: int) -> str:
    """Return the address of `port` at `host`, a name or an IP address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def plain_ip(address: str) -> str:
    """Return the IP address of a client as it is written usually: a socket for IPv4 and IPv6 shows 10.0.0.1 as ::ffff:10.0.0.1."""
    return address.removeprefix("::ffff:")


def is_local(address: str) -> bool:
    """Return True if only this machine reaches the address: a unix socket, or a port on the loopback interface."""
    host = host_of(address)
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def claim_socket(path: Path) -> None:
    """Prepare to listen on a socket: create its folder if it is a private one, remove a stale socket.

    Raises SocketInUse. gRPC would remove the file unconditionally, and so take the socket from a running server.
    """
    if path.parent.name.startswith(PRIVATE_FOLDER_PREFIX):
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise SocketInUse(f"{path.parent} cannot be created: {error.strerror}") from error
        if path.parent.stat().st_uid != os.geteuid():
            raise SocketInUse(f"{path.parent} belongs to another user")
    if not path.is_socket():
        if path.exists():
            raise SocketInUse(f"{path} exists and is not a socket")
        return
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except FileNotFoundError:
            pass
        else:
            raise SocketInUse(f"a server already listens on {path}")


def remove_socket(path: Path) -> None:
    """Remove the socket of a stopped server, and its folder if that is a private one and empty."""
    path.unlink(missing_ok=True)
    if path.parent.name.startswith(PRIVATE_FOLDER_PREFIX):
        try:
            path.parent.rmdir()
        except OSError:  # it holds another shard's socket, or is gone already
            return
