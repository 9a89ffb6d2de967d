"""Addresses of shards and routers: host:port, or unix:///path."""

import ipaddress
import re
from pathlib import Path

_HOST_PORT = re.compile(
    r"(?:\[(?P<ip_v6>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|(?P<host>[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_.])?)):(?P<port>[0-9]{1,5})",
    re.ASCII,
)


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
