"""WorkerLinkServer: the scheduler process's end of the links. A connection for each HTTP worker, over one cluster."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from text_generation_common.log import log
from text_generation_common.sockets import claim_socket, remove_socket
from text_generation_common.waiting import background
from text_generation_proto.worker_link import worker_link_pb2 as pb
from text_generation_router.errors import Draining, ServingError
from text_generation_router.permits import Permits
from text_generation_router.request import Request, RequestId, TenantId
from text_generation_router.shards.cluster import Cluster
from text_generation_router.shards.join import ReplicaInfo
from text_generation_router.worker_link import convert
from text_generation_router.worker_link.columns import WorkerDelivery, WorkerLink, send_report
from text_generation_router.worker_link.link import MAX_UNREAD_BYTES, Link, LinkBroken
from text_generation_router.worker_link.rpc import Handler, RpcPeer

STATE_EVERY_S = 0.25
"""Seconds between two looks at the state of the cluster, which is sent when it changed."""


@dataclass(slots=True)
class WorkerLinkServer:
    cluster: Cluster[WorkerLink]
    delivery: WorkerDelivery
    """The delivery of `cluster`."""
    permits: Permits
    model: ReplicaInfo
    """Describes the shards; every worker gets it."""
    max_unread_bytes: int = MAX_UNREAD_BYTES
    connections: "dict[int, WorkerConnection]" = field(default_factory=dict)
    """By number of the worker."""
    handlers: dict[str, Handler] = field(default_factory=dict)
    """Handlers of the calls of workers; more may be added before `listening`."""

    def __post_init__(self) -> None:
        self.handlers |= {convert.INFO: self._info, convert.SET_ADAPTER: self._set_adapter}

    @asynccontextmanager
    async def listening(self, path: Path) -> AsyncIterator[None]:
        """Accept workers at a Unix socket inside the block. Raises OSError, SocketInUse."""
        await asyncio.to_thread(claim_socket, path)
        loop = asyncio.get_running_loop()
        listener = await loop.create_unix_server(lambda: WorkerConnection(self, self.max_unread_bytes).link, str(path))
        try:
            async with background(self._watch_state()):
                yield
        finally:
            listener.close()
            for connection in list(self.connections.values()):
                connection.link.close()
            await asyncio.to_thread(remove_socket, path)

    async def _watch_state(self) -> None:
        last = self.state()
        while True:
            await asyncio.sleep(STATE_EVERY_S)
            if (state := self.state()) != last:
                last = state
                self._send_state()

    def _send_state(self) -> None:
        for connection in self.connections.values():
            connection.link.send(pb.FromScheduler(state=self.state()))

    def state(self) -> pb.State:
        cluster = self.cluster
        return pb.State(
            ready=cluster.ready,
            stopping=cluster.stopping,
            shards_stopped=cluster.shards_stopped,
            adapters=cluster.adapters,
            status=cluster.status,
        )

    async def _info(self) -> bytes:
        return convert.info_to_json(await self.cluster.info())

    async def _set_adapter(self, name: str, path: str | None) -> None:
        await self.cluster.set_adapter(name, path)
        self._send_state()  # before the reply, whose reader may use the new names


class WorkerConnection:
    """One connection of a worker: its requests and its permits."""

    def __init__(self, server: WorkerLinkServer, max_unread_bytes: int) -> None:
        self.link = Link(
            pb.FromWorker, self._handle, on_open=lambda: None, on_end=self._ended, max_unread_bytes=max_unread_bytes
        )
        self._server = server
        self._worker: int | None = None
        """None before Hello."""
        self._permits: dict[int, tuple[int, TenantId]] = {}
        """By number of the TakePermits."""
        self._last: Request | None = None
        self.rpc = RpcPeer(self.link.send, pb.FromScheduler, server.handlers)
        """Calls to the worker, and from it."""

    def _handle(self, message: pb.FromWorker) -> None:
        kind = message.WhichOneof("kind")
        if (kind == "hello") != (self._worker is None):
            raise LinkBroken("the first message, and only that, is Hello")
        if kind == "submit":
            self._submit(message.submit)
        elif kind == "cancel":
            request = RequestId(message.cancel.request)
            if self._server.delivery.is_of(self.link, request):
                self._server.cluster.cancel(request, satisfied=message.cancel.satisfied)
        elif kind == "take_permits":
            self._take_permits(message.take_permits)
        elif kind == "give_permits":
            if (held := self._permits.pop(message.give_permits.number, None)) is not None:
                self._server.permits.give_back(*held)
        elif kind == "call":
            self.rpc.on_call(message.call)
        elif kind == "reply":
            self.rpc.on_reply(message.reply)
        elif kind == "hello":
            self._open(message.hello)
        else:
            raise LinkBroken("an unknown message")

    def _open(self, hello: pb.Hello) -> None:
        server = self._server
        if hello.worker in server.connections:  # a worker whose lost connection is not yet known to be lost tries again
            raise LinkBroken("this worker is connected")
        self._worker = hello.worker
        server.connections[hello.worker] = self
        for held in hello.held:
            self._hold(held, server.permits.hold)
        state = server.state()
        state.info.CopyFrom(server.model.info)
        state.pool.CopyFrom(server.model.pool)
        self.link.send(pb.FromScheduler(state=state))
        log.info("HTTP worker connected", worker=hello.worker, permits=len(hello.held))

    def _submit(self, message: pb.Submit) -> None:
        server, progress = self._server, convert.progress_from_pb(message)
        images, self.link.data = self.link.data, []
        request, cluster = convert.request_from_pb(message, images, self._last), server.cluster
        self._last = request
        if request.id in server.delivery:
            raise LinkBroken("a request was submitted twice")
        try:
            if cluster.draining and progress is None:
                raise Draining
            cluster.submit(request, self.link, progress)
        except ServingError as error:
            failure = pb.Failure(request=request.id, refusal=convert.refusal_to_pb(error))
            send_report(self.link, pb.Report(failures=[failure]))

    def _take_permits(self, message: pb.TakePermits) -> None:
        reply = pb.Reply(number=message.number)
        try:
            self._hold(message, self._server.permits.acquire)
        except ServingError as error:
            reply.refusal.CopyFrom(convert.refusal_to_pb(error))
        self.link.send(pb.FromScheduler(reply=reply))

    def _hold(self, message: pb.TakePermits, hold: Callable[[int, TenantId], None]) -> None:
        if message.number in self._permits or not message.count:
            raise LinkBroken("invalid TakePermits")
        tenant = TenantId(convert.text_from_pb(message.tenant))
        hold(message.count, tenant)
        self._permits[message.number] = message.count, tenant

    def _ended(self) -> None:
        """Cancel the worker's requests and take its permits back."""
        server, requests = self._server, self._server.delivery.of(self.link)
        if self._worker is not None:
            del server.connections[self._worker]
            write = log.warning if requests else log.info
            write("HTTP worker disconnected", worker=self._worker, cancelled_requests=len(requests))
        for request_id in requests:
            server.cluster.cancel(request_id)
        while self._permits:
            server.permits.give_back(*self._permits.popitem()[1])
        self.rpc.end()
