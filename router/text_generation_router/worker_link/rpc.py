"""Calls over the link: those of this end to the other one, and those of the other end."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from itertools import count

import orjson
from google.protobuf.message import Message

from text_generation_common.log import log
from text_generation_proto.worker_link import worker_link_pb2 as pb
from text_generation_router.errors import GenerationFailed, ServingError
from text_generation_router.worker_link.convert import refusal_from_pb, refusal_to_pb
from text_generation_router.worker_link.link import LinkBroken

Handler = Callable[..., Awaitable[bytes | None]]
"""Takes the arguments of a call of one method, and returns the reply; None: it is empty. May raise ServingError."""
Handlers = Mapping[str, Handler]
"""By method."""


class LinkLost(Exception):
    """The link ended before the reply came."""


class RpcPeer:
    """One end of the link: its calls that have no reply yet, and the calls of the other end that it handles."""

    def __init__(self, send: Callable[[Message], None], envelope: Callable[..., Message], handlers: Handlers) -> None:
        self._send, self._envelope, self._handlers = send, envelope, handlers
        self._numbers = count(1)
        self._open: dict[int, asyncio.Future[bytes]] = {}
        self._handling: set[asyncio.Task[None]] = set()

    async def call(self, method: str) -> bytes:
        """Return the reply to a call without arguments. Raises ServingError, LinkLost."""
        return await self.send(lambda number: self._envelope(call=pb.Call(number=number, method=method)))

    async def send(self, message: Callable[[int], Message]) -> bytes:
        """Send a message with a number, and return the reply. Raises ServingError, LinkLost."""
        number = next(self._numbers)
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._open[number] = reply
        self._send(message(number))
        try:
            return await reply
        finally:
            del self._open[number]

    def on_reply(self, reply: pb.Reply) -> None:
        """Take a reply; no-op if the call was given up."""
        future = self._open.get(reply.number)
        if future is None or future.done():
            return
        if reply.HasField("refusal"):
            future.set_exception(refusal_from_pb(reply.refusal))
        else:
            future.set_result(reply.body)

    def on_call(self, call: pb.Call) -> None:
        """Handle a call of the other end. Raises LinkBroken."""
        if call.method not in self._handlers:
            raise LinkBroken(f"unknown method {call.method!r}")
        task = asyncio.get_running_loop().create_task(self._handle(call))
        self._handling.add(task)
        task.add_done_callback(self._handling.discard)

    async def _handle(self, call: pb.Call) -> None:
        reply = pb.Reply(number=call.number)
        try:
            reply.body = await self._handlers[call.method](*orjson.loads(call.arguments or b"[]")) or b""
        except ServingError as error:
            reply.refusal.CopyFrom(refusal_to_pb(error))
        except Exception:  # without a reply the other end would wait forever
            log.exception("a call of the link failed", method=call.method)
            reply.refusal.CopyFrom(refusal_to_pb(GenerationFailed("internal error")))
        self._send(self._envelope(reply=reply))

    def end(self) -> None:
        """Give all calls up: the link ended."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(LinkLost())
        for task in self._handling:
            task.cancel()
