"""The control channel of a tensor-parallel group: what rank 0 tells the others before each step.

    leader      broadcast(kind, payload)       gather() ◄── one int64 of each follower
                      │                            ▲
    follower    receive() → (kind, payload)    answer(value)

A unix socket in a folder of its owner's alone: no port, no key. It is on the path of every step, so a message is one system
call to send and two to receive, by blocking sockets. What the kinds mean is the business of those who use the channel.

Whoever ends, and however, closes its sockets: the other side then raises GroupBroken where it reads or writes, and `watch`
sees it even while a thread of ours is stuck in a device call that waits for the dead process for ever. A collective that
fails instead, in words of its library's, says the same in one line within `NamingTheLost`.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from pathlib import Path

from text_generation_proto.sockets import SocketInUse, claim_socket, remove_socket
from text_generation_shard.engine import EngineError

GOODBYE = 0
"""The kind of the last message: the leader leaves in order. Kinds of others are positive."""
RETRY_EVERY = 0.02
"""Seconds between two tries to connect. There is no event for "somebody listens there now"."""
LOST_WITHIN = 0.5
"""Seconds in which a process is seen to be gone whose end a collective has just failed of: its connections do not end at once."""

_MAGIC = 0x54475031
"""Begins a greeting: whoever connects by mistake is told apart."""
_GREETING = struct.Struct("<III")
"""magic, rank, size of the group."""
_HEADER = struct.Struct("<II")
"""kind, bytes of payload."""
_ANSWER = struct.Struct("<q")


class GroupBroken(EngineError):
    """A process of the group is gone: no step can be computed any more."""


class Leader:
    """The side of rank 0. Made by `gather_group`."""

    def __init__(self, followers: dict[int, socket.socket]) -> None:
        """`followers`: connected sockets by rank."""
        self._followers = {rank: _Peer(f"rank {rank}", followers[rank]) for rank in sorted(followers)}

    def broadcast(self, kind: int, payload: bytes | bytearray | memoryview = b"") -> None:
        """Send to all followers. Returns when the kernel has it, not when they have read it. Raises GroupBroken."""
        message = b"".join((_HEADER.pack(kind, len(payload)), payload))
        for follower in self._followers.values():
            follower.send(message)

    def gather(self) -> list[int]:
        """The answer of each follower to the message before, by rank. Waits for all. Raises GroupBroken."""
        return [_ANSWER.unpack(peer.read(bytearray(_ANSWER.size)))[0] for peer in self._followers.values()]

    def watch(self, tell: Callable[[str], None]) -> None:
        """Have `tell` called, from a thread of the channel's own, when a follower is gone; never after `close`."""
        _watch(list(self._followers.values()), tell)

    def lost(self, within: float) -> str | None:
        """Which follower is gone, in words, or will be in `within` seconds; None if all are there, or are to leave."""
        return _lost(list(self._followers.values()), within)

    def close(self) -> None:
        """Say goodbye and close."""
        for follower in self._followers.values():
            follower.leaving = True  # who is told goodbye may go at once
        with suppress(GroupBroken):
            self.broadcast(GOODBYE)
        for follower in self._followers.values():
            follower.close()


class Follower:
    """The side of a rank above 0. Made by `meet_leader`."""

    def __init__(self, leader: socket.socket) -> None:
        """`leader`: a connected socket."""
        self._leader = _Peer("rank 0", leader)
        self._header = bytearray(_HEADER.size)
        self._payload = bytearray(1 << 16)

    def receive(self) -> tuple[int, memoryview]:
        """Wait for the next message: its kind and payload. Raises GroupBroken.

        The payload is a view of the channel's own buffer, which the next call fills anew.
        """
        kind, size = _HEADER.unpack(self._leader.read(self._header))
        if size > len(self._payload):
            self._payload = bytearray(size)  # not resized: the view given out before forbids it
        return kind, self._leader.read(memoryview(self._payload)[:size])

    def answer(self, value: int) -> None:
        """Send one int64 to the leader, who gathers it. Raises GroupBroken."""
        self._leader.send(_ANSWER.pack(value))

    def watch(self, tell: Callable[[str], None]) -> None:
        """Have `tell` called, from a thread of the channel's own, when the leader is gone; never after `close`."""
        _watch([self._leader], tell)

    def lost(self, within: float) -> str | None:
        """That the leader is gone, in words, or will be in `within` seconds; None if it is there, or this side has closed."""
        return _lost([self._leader], within)

    def close(self) -> None:
        """Close. A `receive` that waits raises GroupBroken."""
        self._leader.close()


class _Peer:
    """One connection: whole messages, and GroupBroken for whatever ends it."""

    def __init__(self, name: str, connection: socket.socket) -> None:
        self.name = name
        self.leaving = False
        """Whether an end is expected."""
        self._socket = connection
        connection.settimeout(None)  # with a time-out, each call would poll before it reads

    def duplicate(self) -> int:
        """Another descriptor of the same connection."""
        return os.dup(self._socket.fileno())

    @property
    def end(self) -> str | None:
        """In words, when the connection has ended; None if that was expected."""
        return None if self.leaving else f"{self.name} is gone"

    def send(self, message: bytes) -> None:
        try:
            self._socket.sendall(message)
        except OSError as error:
            raise self._gone(error) from error

    def read(self, buffer: bytearray | memoryview) -> memoryview:
        """Fill `buffer`, and return a view of it."""
        whole = rest = memoryview(buffer)
        while rest:
            try:
                count = self._socket.recv_into(rest, flags=socket.MSG_WAITALL)
            except OSError as error:
                raise self._gone(error) from error
            if not count:
                raise self._gone(None)
            rest = rest[count:]
        return whole

    def close(self) -> None:
        """Close, and wake whoever reads."""
        self.leaving = True
        with suppress(OSError):  # the other side was first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _gone(self, error: OSError | None) -> GroupBroken:
        return GroupBroken(f"{self.name} is gone" if error is None else f"{self.name} is gone: {error.strerror}")


class _Ends:
    """Waits for the first of some connections to end, by descriptors of its own: these stay valid whoever closes theirs."""

    def __init__(self, peers: list[_Peer]) -> None:
        self._poll = select.poll()
        self._peers = {peer.duplicate(): peer for peer in peers}
        for descriptor in self._peers:
            # Of a unix socket: the other end was closed. What there is to read is not asked for.
            self._poll.register(descriptor, getattr(select, "POLLRDHUP", 0))

    def wait(self, seconds: float | None = None) -> str | None:
        """What there is to be said of the end of the first; None after `seconds`. To be called once."""
        try:
            events = self._poll.poll(None if seconds is None else seconds * 1e3)
        finally:
            for descriptor in self._peers:
                os.close(descriptor)
        return self._peers[events[0][0]].end if events else None


def _watch(peers: list[_Peer], tell: Callable[[str], None]) -> None:
    ends = _Ends(peers)

    def wait() -> None:
        if (end := ends.wait()) is not None:
            tell(end)

    # What the log says of every record lives in the context.
    threading.Thread(target=copy_context().run, args=(wait,), name="group watch", daemon=True).start()


def _lost(peers: list[_Peer], within: float) -> str | None:
    return None if any(peer.leaving for peer in peers) else _Ends(peers).wait(within)


class NamingTheLost:
    """A context for collectives: one that fails since a process is gone raises GroupBroken, which says who; any other error stays."""

    def __init__(self, channel: Leader | Follower | None) -> None:
        self._channel = channel

    def __enter__(self) -> None:
        """Once a step and more: nothing to do."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._channel is None or not isinstance(error, RuntimeError):  # which those of torch.distributed are
            return
        if lost := self._channel.lost(LOST_WITHIN):
            raise GroupBroken(lost) from error


def gather_group(path: Path, size: int, timeout: float) -> Leader:
    """Listen at `path` until the `size` - 1 followers have come. Raises EngineError after `timeout` seconds.

    The socket is there only for so long: once all have met, nothing is left in the file system.
    """
    until = time.monotonic() + timeout
    followers: dict[int, socket.socket] = {}
    try:
        with _listening(path, size) as listener:
            while len(followers) < size - 1:
                missing = sorted(set(range(1, size)) - followers.keys())
                connection = _accept(listener, until, f"{_ranks(missing)} did not come within {timeout:g} s")
                rank = _greeted_by(connection, size, followers)
                followers[rank] = connection
    except BaseException:
        for connection in followers.values():
            connection.close()
        raise
    return Leader(followers)


def meet_leader(path: Path, rank: int, size: int, timeout: float) -> Follower:
    """Connect to the leader at `path` as `rank` of `size`. Raises EngineError after `timeout` seconds."""
    until = time.monotonic() + timeout
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(path))
            connection.sendall(_GREETING.pack(_MAGIC, rank, size))
        except OSError as error:
            connection.close()
            if time.monotonic() > until:
                reason = f"rank 0 was not to be met at {path} within {timeout:g} s: {error.strerror}"
                raise EngineError(reason) from error
            time.sleep(RETRY_EVERY)
        else:
            return Follower(connection)


@contextmanager
def _listening(path: Path, size: int) -> Iterator[socket.socket]:
    try:
        claim_socket(path)
    except SocketInUse as error:
        raise EngineError(str(error)) from error
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(str(path))
            # Nobody can connect before listen: there is no moment with wider rights.
            os.chmod(path, 0o600)
            listener.listen(size)
        except OSError as error:
            raise EngineError(f"cannot listen on {path}: {error.strerror}") from error
        try:
            yield listener
        finally:
            remove_socket(path)


def _accept(listener: socket.socket, until: float, complaint: str) -> socket.socket:
    listener.settimeout(max(until - time.monotonic(), 1e-3))
    try:
        connection, _ = listener.accept()
    except TimeoutError as error:
        raise EngineError(complaint) from error
    connection.settimeout(max(until - time.monotonic(), 1e-3))  # a greeting follows at once, or never
    return connection


def _greeted_by(connection: socket.socket, size: int, there: dict[int, socket.socket]) -> int:
    """The rank of whoever has connected. Raises EngineError if it has no place in this group."""
    greeting = bytearray(_GREETING.size)
    try:
        received = connection.recv_into(greeting, flags=socket.MSG_WAITALL)
    except OSError:
        received = 0
    magic: int
    rank: int
    its_size: int
    magic, rank, its_size = _GREETING.unpack(greeting)
    if received < _GREETING.size or magic != _MAGIC:
        problem = "what connected is no shard"
    elif its_size != size:
        problem = f"rank {rank} believes in a group of {its_size}, and there are {size}"
    elif not 0 < rank < size:
        problem = f"rank {rank} is not one of a group of {size}"
    elif rank in there:
        problem = f"rank {rank} came twice"
    else:
        return rank
    connection.close()
    raise EngineError(f"the group cannot be gathered: {problem}")


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
