"""The link between HTTP workers and the scheduler process: it changes nothing for clients, and one end harms no other."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio
from cluster_listener import Listener
from every_dialect import STREAMED, VERBATIM, WHOLE, Asking, name, stream_data
from http_stack import Stack, serve, until, worker_of

from text_generation_proto.values import LogprobOptions
from text_generation_proto.worker_link import worker_link_pb2 as pb
from text_generation_router.dashboard.state import Sample
from text_generation_router.errors import GenerationFailed, Overloaded, ServingError
from text_generation_router.rate_limits import RateLimits
from text_generation_router.request import QualityOfService, Request, RequestId, TenantId
from text_generation_router.stats import SAMPLE, packed
from text_generation_router.stats.remote import RemoteStats
from text_generation_router.worker_link.convert import request_to_pb
from text_generation_router.worker_link.link import LENGTH, Link
from text_generation_router.worker_link.remote_limits import START_REQUEST, RemotePermits, rate_handlers

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO = pb.FromWorker(hello=pb.Hello(worker=9))
TEXT = "one two three four"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(demo_model: Path) -> AsyncIterator[Stack]:
    async with serve(demo_model, chat_template=VERBATIM, max_concurrent_requests=8, linked=True) as running:
        yield running


def requests() -> list[Request]:
    """Requests whose listeners get calls of every kind; some are refused."""
    scores = LogprobOptions(top_n=3, prompt=True, prompt_top_n=2, tokens=True)
    plain = Request(RequestId(0), tuple(range(50, 90)), 12)
    return [
        plain,
        replace(plain, logprobs=LogprobOptions(tokens=True)),
        replace(plain, logprobs=scores),
        replace(plain, stop_token_ids=frozenset({55})),
        replace(plain, qos=QualityOfService(TenantId("\udcff \ud800"), salt="\ud800", end_by=1.0)),
        replace(plain, max_new_tokens=1 << 24),
    ]


async def test_a_listener_is_told_the_same_through_the_link(demo_model: Path) -> None:
    told: list[list[list[object]]] = []
    for linked in (False, True):
        async with serve(demo_model, linked=linked) as stack:
            seen = stack.seen
            told.append([])
            for request in requests():
                listener, request = Listener(), replace(request, id=next(seen.ids))
                try:
                    seen.submit(request, listener)
                except ServingError as error:
                    listener.on_failure(error)
                await listener.over.wait()
                told[-1].append(listener.events)
            satisfied = Listener(wanted=3)
            seen.submit(replace(requests()[0], id=next(seen.ids), max_new_tokens=5000), satisfied)
            await satisfied.over.wait()
            await until(lambda: stack.engine.running == 0 and not stack.scheduler.requests)
            told[-1].append(satisfied.events)
    assert told[0] == told[1]
    assert [len(events) for events in told[0]] == [13, 13, 14, 7, 1, 1, 4]


@pytest.mark.parametrize("asking", STREAMED, ids=name)
async def test_every_dialect_streams(stack: Stack, asking: Asking) -> None:
    async with stack.client.post(asking.path, json=asking.streamed(TEXT, 4)) as response:
        assert response.status == 200
        assert TEXT.split()[-1] in str(stream_data(await response.read()))
    async with stack.client.post(asking.path, json=asking.streamed(TEXT, 1000)) as response:
        await response.content.readany()
    await stack.assert_empty()  # the client that left has freed its slot and its permit


@pytest.mark.parametrize("asking", WHOLE, ids=name)
async def test_a_refusal_keeps_its_status(stack: Stack, asking: Asking) -> None:
    async def refusal(body: dict[str, object]) -> tuple[int, bool]:
        async with stack.client.post(asking.path, json=asking.body(TEXT, 100) | body) as response:
            return response.status, "retry-after" in response.headers

    assert await refusal({"timeout": 0.000_001}) == (408, False)
    await until(lambda: stack.permits.in_use == 0)
    async with stack.permits.take(8):
        assert await refusal({}) == (429, True)
    stack.cluster.draining = True
    assert await refusal({}) == (503, True)
    stack.cluster.draining = False


async def test_permits_are_those_of_all_workers_and_return_with_a_lost_one(stack: Stack) -> None:
    assert stack.link_server is not None
    async with AsyncExitStack() as held, worker_of(stack.socket, 1) as one, worker_of(stack.socket, 2) as two:
        ones, twos = RemotePermits(8, one.link), RemotePermits(8, two.link)
        await held.enter_async_context(twos.take(3))
        async with ones.take(5):
            with pytest.raises(Overloaded) as refused:
                await twos.take(1).__aenter__()
        estimated = stack.scheduler.estimated_wait(TenantId(""), for_permit=True)
        assert refused.value.retry_after_s == (1.0 if estimated is None else estimated)
        await until(lambda: stack.permits.in_use == 3)
        await held.enter_async_context(twos.take(5))
        waiting = asyncio.create_task(ones.take(1).__aenter__())  # noqa: TID251 - cancelled below
        await asyncio.sleep(0)
        waiting.cancel()
        assert stack.permits.in_use <= 9
        # A link that is cut keeps the permits of its worker: it says at once what it holds.
        stack.link_server.connections[2].link.cut_off("a test")
        await until(lambda: stack.permits.in_use == 0)
        await until(lambda: stack.permits.in_use == 8)
    await until(lambda: stack.permits.in_use == 0)


@dataclass
class Peer:
    """A connection to the scheduler's socket that sends what it likes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, message: pb.FromWorker) -> None:
        frame = message.SerializeToString()
        self.writer.write(LENGTH.pack(len(frame)) + frame)

    async def ended(self) -> bool:
        """Return True once the other end has closed the connection."""
        async with asyncio.timeout(10):
            try:
                while await self.reader.read(1 << 16):
                    pass
            except ConnectionError:
                return True
        return True


@asynccontextmanager
async def peer(stack: Stack) -> AsyncIterator[Peer]:
    reader, writer = await asyncio.open_unix_connection(str(stack.socket))
    yield Peer(reader, writer)
    writer.close()


def submit(without: str = "", number: int = 1 << 60, new_tokens: int = 12, **changes: object) -> pb.FromWorker:
    """A valid request, without a field and with changes."""
    message = request_to_pb(replace(requests()[0], max_new_tokens=new_tokens), RequestId(number), None)
    if without:
        message.ClearField(without)  # type: ignore[arg-type]
    for field, value in changes.items():
        setattr(message, field, value)
    return pb.FromWorker(submit=message)


HOSTILE = {
    "noise": [random.Random(1).randbytes(4096)],
    "no protobuf": [HELLO, LENGTH.pack(3) + b"\xff\xff\xff"],
    "a request before Hello": [submit()],
    "Hello twice": [HELLO, HELLO],
    "the number of a connected worker": [pb.FromWorker(hello=pb.Hello(worker=0))],
    "an empty message": [HELLO, pb.FromWorker()],
    "no prompt": [HELLO, submit("prompt")],
    "no new tokens": [HELLO, submit("stopping")],
    "an unknown priority": [HELLO, submit(priority=77)],
    "a tenant that is no text": [HELLO, submit(tenant=b"\xff")],
    "a request twice": [HELLO, submit(), submit()],
    "permits twice": [HELLO, *[pb.FromWorker(take_permits=pb.TakePermits(number=1, count=1))] * 2],
    "no permits": [HELLO, pb.FromWorker(take_permits=pb.TakePermits(number=1))],
    "an unknown method": [HELLO, pb.FromWorker(call=pb.Call(number=1, method="the weather"))],
}


@pytest.mark.parametrize("sent", HOSTILE.values(), ids=HOSTILE)
async def test_hostile_bytes_end_their_connection_only(stack: Stack, sent: list[bytes | pb.FromWorker]) -> None:
    async with stack.client.post("/generate_stream", json=STREAMED[0].body(TEXT, 50)) as running:
        async with peer(stack) as hostile:
            for each in sent:
                if isinstance(each, bytes):
                    hostile.writer.write(each)
                    await hostile.writer.drain()
                else:
                    hostile.send(each)
            assert await hostile.ended()
        assert len(stream_data(await running.read())) == 50
    await stack.assert_empty()


async def test_a_worker_cannot_cancel_requests_of_another(stack: Stack) -> None:
    async with (
        stack.client.post("/generate_stream", json=STREAMED[0].body(TEXT, 50)) as running,
        peer(stack) as hostile,
    ):
        [request] = stack.scheduler.requests
        hostile.send(HELLO)
        hostile.send(pb.FromWorker(cancel=pb.Cancel(request=request)))
        hostile.send(HELLO)  # ends the connection: the message before it has arrived
        assert await hostile.ended()
        assert len(stream_data(await running.read())) == 50


async def test_a_call_that_cannot_be_handled_is_refused(stack: Stack) -> None:
    assert stack.link_server is not None
    stack.link_server.handlers.update(rate_handlers(RateLimits()))
    async with worker_of(stack.socket, 1) as worker:
        with pytest.raises(GenerationFailed, match="internal error"):
            await worker.link.call(START_REQUEST, "noise")
        assert await worker.link.call("info")


async def test_viewers_of_a_worker_share_the_calls_for_samples(stack: Stack) -> None:
    assert stack.link_server is not None
    asked: list[float] = []
    taken = asyncio.Event()

    async def sample(at: float) -> Sample:
        asked.append(at)
        await taken.wait()
        return Sample(at + 1, b"common", b"full")

    stack.link_server.handlers[SAMPLE] = lambda at: packed(sample(at))
    async with worker_of(stack.socket, 1) as worker, asyncio.TaskGroup() as viewers:
        stats = RemoteStats(worker.link)
        shown = [viewers.create_task(stats.sample_after(at)) for at in (1.0, 1.0, 1.0, 5.0)]
        await until(lambda: len(asked) == 2)
        shown[0].cancel()
        taken.set()
        assert [(await each).at for each in shown[1:]] == [2.0, 2.0, 6.0]
        assert (await stats.sample_after(2.0)).full == b"full"
        assert asked == [1.0, 5.0, 2.0]


STRANGER = """
import os, socket, sys
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as link:
    link.connect(sys.argv[1])
    sys.exit(link.recv(1) != b"")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
async def test_a_peer_of_another_user_is_refused(stack: Stack) -> None:
    await asyncio.to_thread(stack.socket.parent.chmod, 0o755)
    await asyncio.to_thread(stack.socket.chmod, 0o777)
    stranger = await asyncio.create_subprocess_exec(sys.executable, "-c", STRANGER, str(stack.socket))
    async with asyncio.timeout(10):
        assert await stranger.wait() == 0
    await stack.assert_empty()


@pytest.mark.full
async def test_a_worker_that_is_seconds_behind_is_not_cut_off(demo_model: Path) -> None:
    scored = replace(
        requests()[0], prompt=tuple(range(50, 8050)), logprobs=LogprobOptions(prompt=True, prompt_top_n=20)
    )
    async with serve(demo_model, chats=False, linked=True) as stack, peer(stack) as busy:
        busy.send(HELLO)
        for number in range(24):
            busy.send(pb.FromWorker(submit=request_to_pb(scored, RequestId(number))))
        await until(lambda: len(stack.scheduler.requests) == 24)
        await until(lambda: not stack.scheduler.requests)
        prompts = size = 0
        while prompts < 24:
            frame = await busy.reader.readexactly(*LENGTH.unpack(await busy.reader.readexactly(4)))
            prompts, size = prompts + len(pb.FromScheduler.FromString(frame).report.prompt_logprobs), size + len(frame)
        assert size > 1 << 24


async def test_a_worker_that_does_not_read_is_cut_off_alone(demo_model: Path) -> None:
    async with serve(demo_model, chats=False, linked=True, max_unread_bytes=1 << 16, max_batch_size=256) as stack:
        post = stack.client.post("/generate_stream", json=STREAMED[0].body(TEXT, 1000))
        async with post as running, peer(stack) as deaf:
            deaf.send(HELLO)
            for number in range(100):
                deaf.send(submit(number=number, new_tokens=20_000))
            assert stack.link_server is not None
            connections = stack.link_server.connections
            await until(lambda: 9 in connections)
            await until(lambda: 9 not in connections)
            assert len(stream_data(await running.read())) == 1000
        await stack.assert_empty()


async def test_many_frames_leave_the_event_loop_between_them() -> None:
    """A worker that gets megabytes at once writes to its clients before it has handled all of them."""
    total, numbers, between, done = 60_000, list[int](), list[int](), asyncio.Event()
    frames = [pb.FromWorker(cancel=pb.Cancel(request=number)).SerializeToString() for number in range(total)]

    def on_message(message: pb.FromWorker) -> None:
        if not numbers:
            asyncio.get_running_loop().call_soon(lambda: between.append(len(numbers)))
        numbers.append(message.cancel.request)
        if len(numbers) == total:
            done.set()

    near, far = socket.socketpair()
    link = Link(pb.FromWorker, on_message, lambda: None, lambda: None)
    await asyncio.get_running_loop().create_connection(lambda: link, sock=near)
    link.data_received(b"".join(LENGTH.pack(len(frame)) + frame for frame in frames))
    async with asyncio.timeout(10):
        await done.wait()
    link.close()
    far.close()
    assert numbers == list(range(total))
    assert 0 < between[0] < total
