"""Link: one end of the connection between an HTTP worker and the scheduler process. Frames of worker_link.proto."""

import asyncio
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

from google.protobuf.message import DecodeError, Message

from text_generation_common.log import log
from text_generation_common.sockets import peer_user

LENGTH = struct.Struct("<I")
"""The length of a frame before its bytes."""
MAX_FRAME_BYTES = 1 << 28
"""Largest message, and data before one. The largest that is sent has the log-probabilities of a long prompt's tokens."""
DATA = 1 << 31
"""Set in the length of a frame of data."""
DATA_BYTES = 1 << 20
"""Bytes of such a frame. A shorter one, which may be empty, ends a piece of data: the event loop runs between them."""
MAX_UNREAD_BYTES = 1 << 28
"""Bytes that the other end has not read; beyond it the connection is cut off. A worker that writes the log-probabilities of many
long prompts is seconds and tens of megabytes behind; one that hangs is killed before it reaches the limit."""
HANDLED_AT_ONCE = 1 << 16
"""Bytes of frames that are handled before the event loop runs: the worker writes to its clients in between."""


Received = TypeVar("Received", bound=Message)


class LinkBroken(Exception):
    """The other end sent something that breaks the protocol."""


@dataclass(eq=False)
class Link(asyncio.Protocol, Generic[Received]):
    """Reads messages of one type and writes others. All of an iteration of the event loop are written together.

    All calls are made on the event loop of the process.
    """

    received: type[Received]
    on_message: Callable[[Received], None]
    """May raise LinkBroken."""
    on_open: Callable[[], None]
    on_end: Callable[[], None]
    """Called once if `on_open` was called."""
    max_unread_bytes: int = MAX_UNREAD_BYTES
    data: list[bytes] = field(default_factory=list)
    """The pieces of data that came, until they are taken."""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _transport: asyncio.Transport | None = None
    _rest: bytearray = field(default_factory=bytearray)
    """The incomplete frame at the end of the bytes received."""
    _needed: int = 0
    """Bytes of `_rest` that must be there before it is looked at again: a large frame comes in thousands of pieces."""
    _resuming: bool = False
    """True while whole frames in `_rest` wait for the next iteration of the event loop, and nothing is read."""
    _unsent: list[bytes | memoryview] = field(default_factory=list)
    _part: list[bytes] = field(default_factory=list)
    """The data that has not ended."""

    @property
    def closed(self) -> bool:
        """True if there is no connection, or it is about to end."""
        return self._transport is None or self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if (user := peer_user(transport.get_extra_info("socket"))) != os.geteuid():
            log.warning("connection of another user refused", user=user)
            transport.close()
            return
        self._transport = cast("asyncio.Transport", transport)
        self.on_open()

    def data_received(self, data: bytes) -> None:
        if self.closed:
            return
        if self._rest:
            self._rest += data
            if self._resuming or len(self._rest) < self._needed:
                return
            data = bytes(self._rest)
        self._handle(data)

    def _resume(self) -> None:
        self._resuming = False
        if self._transport is not None and not self.closed:
            self._transport.resume_reading()
            self._handle(bytes(self._rest))

    def _handle(self, data: bytes) -> None:
        """Handle frames, and keep the rest of `data`."""
        try:
            start = self._read_frames(data)
        except (LinkBroken, DecodeError) as error:
            self.cut_off(f"protocol error: {error}")
        except Exception:  # a message that breaks something costs its own connection
            log.exception("a message could not be handled")
            self.cut_off("a message could not be handled")
        else:
            self._rest = bytearray(data[start:])

    def _read_frames(self, data: bytes) -> int:
        """Handle whole frames in `data`. Return the position behind them. Raises LinkBroken, DecodeError."""
        start, size = 0, len(data)
        self._needed = LENGTH.size
        while size - start >= LENGTH.size and not self.closed:
            (length,) = LENGTH.unpack_from(data, start)
            is_data, length = length & DATA, length & ~DATA
            if length > MAX_FRAME_BYTES:
                raise LinkBroken(f"a frame of {length} bytes")
            end = start + LENGTH.size + length
            if end > size:
                self._needed = end - start
                break
            frame = data[start + LENGTH.size : end]
            self._take_data(frame) if is_data else self.on_message(self.received.FromString(frame))
            start = end
            if start >= HANDLED_AT_ONCE and start < size and self._transport is not None:
                self._resuming = True
                self._transport.pause_reading()
                self._loop.call_soon(self._resume)
                break
        return start

    def _take_data(self, frame: bytes) -> None:
        self._part.append(frame)
        if sum(map(len, (*self.data, *self._part))) > MAX_FRAME_BYTES:
            raise LinkBroken("too much data")
        if len(frame) < DATA_BYTES:
            self.data.append(b"".join(self._part))
            self._part.clear()

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is not None:
            self._transport = None
            self.on_end()

    def send(self, message: Message) -> None:
        """Send a message at the end of this iteration of the event loop; no-op once the connection has ended."""
        frame = message.SerializeToString()
        self._add(len(frame), frame)

    def send_data(self, data: bytes) -> None:
        """Send a piece of data, which belongs to the next message, in frames."""
        for start in range(0, len(data) + 1, DATA_BYTES):
            part = memoryview(data)[start : start + DATA_BYTES]
            self._add(DATA | len(part), part)

    def _add(self, length: int, frame: bytes | memoryview) -> None:
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(LENGTH.pack(length))
        self._unsent.append(frame)

    def _flush(self) -> None:
        frames, self._unsent = self._unsent, []
        if self._transport is None or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > self.max_unread_bytes:
            self.cut_off("the other end does not read")
            return
        self._transport.write(b"".join(frames))

    def cut_off(self, reason: str) -> None:
        """End the connection now, and say why."""
        if self._transport is not None and not self._transport.is_closing():
            log.warning("link cut off", reason=reason)
            self._transport.abort()

    def close(self) -> None:
        """End the connection once everything is sent."""
        if self._transport is not None:
            self._flush()
            self._transport.close()
