"""The control channel of a tensor-parallel group: the commands that rank 0 sends to the others before each step.

    leader      broadcast(kind, payload)       gather() ◄── one int64 from each follower
                      │                            ▲
    follower    receive() → (kind, payload)    answer(value)

On one host it is a unix socket, between hosts a TCP connection: see meeting.py. It is on the path of every step, so a message takes
one system call to send and two to receive, on blocking sockets. The users of the channel define the message kinds.

A process that ends for any reason closes its sockets. The other side then raises GroupBroken when it reads or writes, and
`watch` reports it even while another thread is blocked in a device call that waits for the dead process. A collective that
fails with an error of its library is translated to GroupBroken by `PeerLossTranslator`.
"""

import os
import select
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress
from threading import Thread

from text_generation_shard.engine import EngineError

GOODBYE = 0
"""The kind of the last message: the leader shuts down. Other kinds are positive."""
LOST_WITHIN = 0.5
"""Seconds to wait for the connection of a lost process to close, after a collective has failed because of it."""

_HEADER = struct.Struct("<II")
"""kind, bytes of payload."""
_ANSWER = struct.Struct("<q")


class GroupBroken(EngineError):
    """A process of the group is lost: no step can be computed any more."""


class _Channel:
    """One side of the channel, with connections to the other."""

    def __init__(self, peers: "list[_Peer]") -> None:
        self._peers = peers
        self._reason: str | None = None
        """Description of the peer that was lost first, once it is watched."""

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost` from a thread of the channel when a peer is lost; never after `close`.

        The connections to the others end as well: without the lost one no rank can go on.
        """
        waiter = _EndWaiter(self._peers)

        def wait() -> None:
            if (end := waiter.wait()) is not None:
                self._reason = end
                on_lost(end)
                for peer in self._peers:
                    peer.close()

        Thread(target=wait, name="group watch", daemon=True).start()

    def lost(self, within: float) -> str | None:
        """Return a description of the peer that is lost within `within` seconds; None if none is, or this side is closing."""
        if self._reason is not None or any(peer.leaving for peer in self._peers):
            return self._reason
        return _EndWaiter(self._peers).wait(within)

    def close(self) -> None:
        """Close. A blocked read raises GroupBroken."""
        for peer in self._peers:
            peer.close()


class LeaderChannel(_Channel):
    """The channel of rank 0. Created by `accept_ranks`."""

    def __init__(self, followers: dict[int, socket.socket]) -> None:
        """`followers`: connected sockets by rank."""
        super().__init__([_Peer(f"rank {rank}", followers[rank]) for rank in sorted(followers)])

    def broadcast(self, kind: int, payload: bytes | bytearray | memoryview = b"") -> None:
        """Send to all followers. Returns when the data is in the kernel's buffers. Raises GroupBroken."""
        message = b"".join((_HEADER.pack(kind, len(payload)), payload))
        for follower in self._peers:
            follower.send(message)

    def gather(self) -> list[int]:
        """Wait for the followers' answers to the last message and return them by rank. Raises GroupBroken."""
        return [_ANSWER.unpack(peer.read(bytearray(_ANSWER.size)))[0] for peer in self._peers]

    def close(self) -> None:
        for follower in self._peers:
            follower.leaving = True  # a follower may exit as soon as it reads GOODBYE
        with suppress(GroupBroken):
            self.broadcast(GOODBYE)
        super().close()


class FollowerChannel(_Channel):
    """The channel of a rank above 0. Created by `connect_to_leader`."""

    def __init__(self, leader: socket.socket) -> None:
        """`leader`: a connected socket."""
        self._leader = _Peer("rank 0", leader)
        super().__init__([self._leader])
        self._header = bytearray(_HEADER.size)
        self._payload = bytearray(1 << 16)

    def receive(self) -> tuple[int, memoryview]:
        """Wait for the next message: its kind and its payload, which the next call overwrites. Raises GroupBroken."""
        kind, size = _HEADER.unpack(self._leader.read(self._header))
        if size > len(self._payload):
            self._payload = bytearray(size)  # a new one: a buffer with an exported view cannot be resized
        return kind, self._leader.read(memoryview(self._payload)[:size])

    def answer(self, value: int) -> None:
        """Send one int64, which the leader gathers. Raises GroupBroken."""
        self._leader.send(_ANSWER.pack(value))


class _Peer:
    """One connection: sends and reads whole messages; raises GroupBroken when the connection ends."""

    def __init__(self, name: str, connection: socket.socket) -> None:
        self.name = name
        self.leaving = False
        """True if the end of the connection is expected."""
        self._socket = connection
        self._flags = 0 if isinstance(connection, ssl.SSLSocket) else socket.MSG_WAITALL
        connection.settimeout(None)  # with a timeout, each call would poll before it reads

    def duplicate(self) -> int:
        """Return a duplicate of the connection's file descriptor."""
        return os.dup(self._socket.fileno())

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
                count = self._socket.recv_into(rest, flags=self._flags)
            except OSError as error:
                raise self._gone(error) from error
            if not count:
                raise self._gone(None)
            rest = rest[count:]
        return whole

    def close(self) -> None:
        """Close, and wake a blocked reader."""
        self.leaving = True
        with suppress(OSError):  # the other side has closed already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _gone(self, error: OSError | None) -> GroupBroken:
        return GroupBroken(f"{self.name} is gone" if error is None else f"{self.name} is gone: {error.strerror}")


class _EndWaiter:
    """Waits for the first of several connections to end, on duplicate descriptors, which remain valid when the originals close."""

    def __init__(self, peers: "list[_Peer]") -> None:
        self._poll = select.poll()
        self._peers = {peer.duplicate(): peer for peer in peers}
        for descriptor in self._peers:
            # On a unix socket: the peer has closed its end. Readable data is not reported.
            self._poll.register(descriptor, select.POLLRDHUP)

    def wait(self, seconds: float | None = None) -> str | None:
        """Return a description of the first ended connection; None after `seconds`, or if the end was expected. Call once."""
        try:
            events = self._poll.poll(None if seconds is None else seconds * 1e3)
        finally:
            for descriptor in self._peers:
                os.close(descriptor)
        first = self._peers[events[0][0]] if events else None
        return None if first is None or first.leaving else f"{first.name} is gone"


class PeerLossTranslator:
    """A context manager for collectives: if one fails because a process is lost, raises GroupBroken with the lost rank."""

    def __init__(self, channel: LeaderChannel | FollowerChannel | None) -> None:
        self._channel = channel

    def __enter__(self) -> None:
        """Nothing to do; entered several times per step."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._channel is None or not isinstance(error, RuntimeError):  # base class of torch.distributed's errors
            return
        if lost := self._channel.lost(LOST_WITHIN):
            raise GroupBroken(lost) from error
