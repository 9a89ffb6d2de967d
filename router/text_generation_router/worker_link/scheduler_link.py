"""SchedulerLink: the link of an HTTP worker to the scheduler process. A link that is lost is replaced by a new one."""

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import orjson
from google.protobuf.message import Message

from text_generation_common.waiting import first_of
from text_generation_proto.worker_link import worker_link_pb2 as pb
from text_generation_router.errors import Unhealthy
from text_generation_router.shards.join import ReplicaInfo
from text_generation_router.worker_link.link import Link, LinkBroken
from text_generation_router.worker_link.rpc import Handlers, LinkLost, RpcPeer

CONNECT_EVERY_S = 0.05
"""Seconds between two attempts to connect."""
WITHOUT_LINK_S = 30.0
"""Seconds without a link, or without a reply, for which requests and calls wait."""
NO_ANSWER = "the scheduler process does not answer"
MAX_UNSENT_BYTES = 1 << 30
"""Bytes that the scheduler process has not read, all requests submitted again included; then the connection is cut off."""


@dataclass(slots=True, eq=False)
class SchedulerLink:
    """The worker's end of the link, over all its connections: the state of the other end, and calls to it."""

    path: Path
    """The Unix socket of the scheduler process."""
    worker: int
    """The number of this one."""
    handlers: Handlers
    on_up: Callable[[], None]
    """Called after the first State of a connection."""
    on_report: Callable[[pb.Report], None]
    on_down: Callable[[], None]
    """Called when a connection with a State has ended."""
    state: pb.State = field(default_factory=pb.State)
    """The last one that arrived; of a lost link it is out of date."""
    up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while there is a connection, from its first State on."""
    down: asyncio.Event = field(default_factory=asyncio.Event)
    """Set from the end of a connection to the next attempt to connect."""
    lost_at: float = field(default_factory=time.monotonic)
    """The time of the last loss; before the first connection that of the start."""
    held: dict[int, pb.TakePermits] = field(default_factory=dict)
    """The permits that this worker holds, by number: the next connection begins with them."""
    _link: Link[pb.FromScheduler] | None = None
    """None without a connection."""
    _model: ReplicaInfo | None = None
    """None before the first connection."""
    _rpc: RpcPeer = field(init=False)

    def __post_init__(self) -> None:
        self._rpc = RpcPeer(self.send, pb.FromWorker, self.handlers)

    async def joined(self) -> ReplicaInfo:
        """Connect, and return the description of the model. Waits as long as it takes."""
        while self._model is None:
            await self._connect()
        return self._model

    async def run(self) -> None:
        """Connect again after each loss, until cancelled."""
        while True:
            await self.down.wait()
            await self._connect()

    def close(self) -> None:
        if self._link is not None:
            self._link.close()

    def send(self, message: Message, data: Iterable[bytes] = ()) -> None:
        """Send a message after the data that belongs to it; no-op without a connection."""
        if self._link is not None:
            for each in data:
                self._link.send_data(each)
            self._link.send(message)

    async def _connect(self) -> None:
        """Try to connect until there is a link."""
        loop = asyncio.get_running_loop()
        while not self.up.is_set():
            self.down.clear()
            with suppress(OSError):
                await loop.create_unix_connection(self._new_link, str(self.path))
                await first_of(self.up.wait(), self.down.wait())
            if not self.up.is_set():
                await asyncio.sleep(CONNECT_EVERY_S)

    def _new_link(self) -> Link[pb.FromScheduler]:
        self._link = Link(pb.FromScheduler, self._handle, self._opened, self._ended, MAX_UNSENT_BYTES)
        return self._link

    def _opened(self) -> None:
        self.send(pb.FromWorker(hello=pb.Hello(worker=self.worker, held=self.held.values())))

    def _ended(self) -> None:
        was_up = self.up.is_set()
        self._link = None
        self.up.clear()
        self.down.set()
        if was_up:
            self.lost_at = time.monotonic()
            self.on_down()
        self._rpc.end()

    def _handle(self, message: pb.FromScheduler) -> None:
        kind = message.WhichOneof("kind")
        if kind == "report":
            self.on_report(message.report)
        elif kind == "reply":
            self._rpc.on_reply(message.reply)
        elif kind == "state":
            self.state = message.state
            if message.state.HasField("info"):
                self._model = ReplicaInfo(message.state.info, message.state.pool)
                self.up.set()
                self.on_up()
        elif kind == "call":
            self._rpc.on_call(message.call)
        else:
            raise LinkBroken("an unknown message")

    async def call(self, method: str, *arguments: object, timeout_s: float = WITHOUT_LINK_S) -> bytes:
        """Return the scheduler process's reply to a call; `arguments` can be written as JSON. Raises ServingError."""
        call = partial(pb.Call, method=method, arguments=orjson.dumps(arguments))
        return await self.request(lambda number: pb.FromWorker(call=call(number=number)), timeout_s)

    async def request(self, message: Callable[[int], pb.FromWorker], timeout_s: float = WITHOUT_LINK_S) -> bytes:
        """Send a message with a number, and return the reply; after a loss send it again. Raises ServingError."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if not self.up.is_set():
                        async with asyncio.timeout_at(self.lost_at + WITHOUT_LINK_S):
                            await self.up.wait()
                    with suppress(LinkLost):
                        return await self._rpc.send(message)
        except TimeoutError:
            raise Unhealthy(NO_ANSWER) from None
