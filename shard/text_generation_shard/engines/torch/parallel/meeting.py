"""The meeting of a group: rank 0 listens, the others connect.

    rank 0                            another rank
           ◄──── connects ──────────
           ──── challenge ─────────►
           ◄─── rank, size, challenge, proof
           ──── proof ─────────────►

A proof is an HMAC of both challenges with the shard token, so each side shows that it has the token without sending it. A
connection without a valid proof is closed and logged, and the meeting goes on.

On one host rank 0 listens on a unix socket in a folder that only its owner can access. Between hosts it listens on a TCP port.
With certificates (--shard-tls-cert) such a connection is mutual TLS. Without them the commands that follow are neither encrypted
nor authenticated.

The listener closes when all ranks have connected.
"""

import fcntl
import hashlib
import hmac
import os
import queue
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from text_generation_common.log import log
from text_generation_common.shard_access import ShardAccess
from text_generation_common.sockets import SocketInUse, claim_socket, remove_socket
from text_generation_proto.access import client_context
from text_generation_proto.addresses import socket_path, split_host_port
from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.parallel.channel import FollowerChannel, LeaderChannel

HANDSHAKE_TIMEOUT = 5.0
"""Seconds in which a connection must show that it belongs to the group."""
MAX_HANDSHAKES = 64
"""Connections to the meeting that may be without proof at once; further ones are closed."""
RETRY_EVERY = 0.1
"""Seconds between two attempts to connect to rank 0, which may start later."""
LOST_AFTER_S = 5
"""Seconds without an answer of the other host's kernel after which a connection counts as lost."""

_SIOCGIFADDR = 0x8915
"""Linux' request for the IPv4 address of an interface."""
_GREETING = struct.Struct("<II")
"""rank, world size."""
_CHALLENGE_BYTES = 32
_PROOF_BYTES = 32


def accept_ranks(address: str, size: int, timeout: float, access: ShardAccess) -> LeaderChannel:
    """Listen at `address` until `size` - 1 ranks have connected. Raises EngineError after `timeout` seconds."""
    until = time.monotonic() + timeout
    arrived: queue.SimpleQueue[tuple[bytes, socket.socket]] = queue.SimpleQueue()
    followers: dict[int, socket.socket] = {}
    path = socket_path(address)
    try:
        tls = _server_tls(access) if path is None else None
        listener = listen(split_host_port(address)) if path is None else _listen_on_socket(path)
    except (OSError, SocketInUse) as error:
        raise EngineError(f"cannot listen at {address} for the group: {error}") from error
    meeting = _MeetingListener(listener, access.shard_token, tls, arrived)
    threading.Thread(target=meeting.accept, name="group meeting", daemon=True).start()
    try:
        while len(followers) < size - 1:
            try:
                message, connection = arrived.get(timeout=max(until - time.monotonic(), 1e-3))
            except queue.Empty:
                raise EngineError(f"{_missing_ranks(size, followers)} did not connect within {timeout:g} s") from None
            for rank in [rank for rank, earlier in followers.items() if _has_ended(earlier)]:
                followers.pop(rank).close()  # it was restarted before the group was complete
            followers[_greeted_by(message, connection, size, followers)] = connection
    except BaseException:
        for connection in followers.values():
            connection.close()
        raise
    finally:
        meeting.stop()
        if path is not None:
            remove_socket(path)
    return LeaderChannel(followers)


def connect_to_leader(address: str, rank: int, size: int, timeout: float, access: ShardAccess) -> FollowerChannel:
    """Connect to the leader at `address` as `rank` of `size`. Raises EngineError after `timeout` seconds."""
    until = time.monotonic() + timeout
    while True:
        try:
            return FollowerChannel(_introduce(address, rank, size, access))
        except (OSError, EngineError) as error:
            if time.monotonic() > until:
                raise EngineError(f"rank 0 could not be met at {address} within {timeout:g} s: {error}") from error
        time.sleep(RETRY_EVERY)


@dataclass(slots=True)
class _MeetingListener:
    """Accepts connections, each in a thread of its own until it has proven that it belongs to the group."""

    listener: socket.socket
    token: str
    tls: ssl.SSLContext | None
    arrived: queue.SimpleQueue[tuple[bytes, socket.socket]]
    """The greeting of each rank, and its connection."""
    handshakes: threading.BoundedSemaphore = field(default_factory=lambda: threading.BoundedSemaphore(MAX_HANDSHAKES))
    stopped: bool = False

    def stop(self) -> None:
        """Stop to listen; also wakes the thread that accepts."""
        self.stopped = True
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def accept(self) -> None:
        while not self.stopped:
            try:
                connection, peer = self.listener.accept()
            except OSError:  # closed, or no descriptor is left for another connection
                time.sleep(RETRY_EVERY)
                continue
            if not self.handshakes.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._verify, args=(connection, peer), name="group handshake", daemon=True).start()

    def _verify(self, connection: socket.socket, peer: object) -> None:
        try:
            connection.settimeout(HANDSHAKE_TIMEOUT)
            if self.tls is not None:
                connection = self.tls.wrap_socket(connection, server_side=True)
            challenge = secrets.token_bytes(_CHALLENGE_BYTES)
            connection.sendall(challenge)
            message = _receive(connection, _GREETING.size + _CHALLENGE_BYTES + _PROOF_BYTES)
            introduction, proof = message[:-_PROOF_BYTES], message[-_PROOF_BYTES:]
            if not hmac.compare_digest(proof, _proof(self.token, b"rank", challenge, introduction)):
                raise EngineError("it does not have this group's token")
            connection.sendall(_proof(self.token, b"rank 0", introduction, challenge))
        except (OSError, EngineError) as error:
            log.warning("a connection to the group was refused", peer=str(peer), reason=str(error))
            connection.close()
        else:
            _watch_host(connection)
            self.arrived.put((introduction[: _GREETING.size], connection))
        finally:
            self.handshakes.release()


def _introduce(address: str, rank: int, size: int, access: ShardAccess) -> socket.socket:
    """Return a connection to the leader on which both sides have proven themselves. Raises OSError or EngineError."""
    if path := socket_path(address):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(HANDSHAKE_TIMEOUT)
    else:
        connection = socket.create_connection(target := split_host_port(address), timeout=HANDSHAKE_TIMEOUT)
    try:
        if path:
            connection.connect(str(path))
        elif access.shard_tls_cert:
            context = client_context(access.shard_tls_ca)
            context.load_cert_chain(access.shard_tls_cert, access.shard_tls_key)
            connection = context.wrap_socket(connection, server_hostname=access.shard_tls_name or target[0])
        challenge = _receive(connection, _CHALLENGE_BYTES)
        introduction = _GREETING.pack(rank, size) + secrets.token_bytes(_CHALLENGE_BYTES)
        connection.sendall(introduction + _proof(access.shard_token, b"rank", challenge, introduction))
        proof = _receive(connection, _PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(access.shard_token, b"rank 0", introduction, challenge)):
            raise EngineError("rank 0 does not have this group's token")
        _watch_host(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _proof(token: str, role: bytes, *parts: bytes) -> bytes:
    return hmac.digest(token.encode(), b"|".join((b"text-generation group", role, *parts)), hashlib.sha256)


def _receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        if not (more := connection.recv(size - len(received))):
            raise EngineError("the connection was closed: is SHARD_TOKEN the same on every host?")
        received += more
    return received


def _greeted_by(message: bytes, connection: socket.socket, size: int, connected: Container[int]) -> int:
    """Return the rank that sent the greeting `message`. Raises EngineError if it does not belong to this group."""
    rank: int
    rank, peer_size = _GREETING.unpack(message)
    if peer_size != size:
        problem = f"rank {rank} has world size {peer_size}, expected {size}"
    elif not 0 < rank < size:
        problem = f"rank {rank} is not in a group of {size}"
    elif rank in connected:
        problem = f"rank {rank} connected twice"
    else:
        return rank
    connection.close()
    raise EngineError(f"the group could not be formed: {problem}")


def _missing_ranks(size: int, connected: Container[int]) -> str:
    ranks = [rank for rank in range(1, size) if rank not in connected]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _listen_on_socket(path: Path) -> socket.socket:
    """Return a listening unix socket that only its owner can access. Raises OSError or SocketInUse."""
    claim_socket(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        # Connections are refused before listen, so the wider permissions are never usable.
        os.chmod(path, 0o600)
        listener.listen(MAX_HANDSHAKES)
    except OSError:
        listener.close()
        raise
    return listener


def listen(address: tuple[str, int]) -> socket.socket:
    """Return a listening socket at a host, by name or number, and a port. Raises OSError."""
    family, _, _, _, target = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    return socket.create_server(target[:2], family=family, backlog=MAX_HANDSHAKES)


def network_interface(host: str) -> str | None:
    """Return the network interface that reaches `host`, for gloo and NCCL; None if it has a secondary or IPv6 address."""
    family, _, _, _, target = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with suppress(OSError):  # an interface without an IPv4 address
                if socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]) == own:
                    return name
    return None


def _server_tls(access: ShardAccess) -> ssl.SSLContext | None:
    if not access.shard_tls_cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(access.shard_tls_cert, access.shard_tls_key)
    context.load_verify_locations(access.shard_tls_ca)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _watch_host(connection: socket.socket) -> None:
    """Let the connection end if the other host vanishes, and send each command at once."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 2),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, LOST_AFTER_S - 2),
        (socket.TCP_USER_TIMEOUT, LOST_AFTER_S * 1000),
        (socket.TCP_NODELAY, 1),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _has_ended(connection: socket.socket) -> bool:
    """Return True if the other side, which sends nothing before the group is complete, has closed the connection."""
    connection.settimeout(0.0)
    try:
        return not connection.recv(1)
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(HANDSHAKE_TIMEOUT)
