"""Frames and columns of the link: any division of the bytes gives the same messages, and each worker gets its own tokens."""

from __future__ import annotations

import asyncio
import socket
import struct
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cluster_listener import Listener
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from text_generation_proto.v1 import shard_pb2
from text_generation_proto.values import FinishReason
from text_generation_proto.worker_link import worker_link_pb2 as pb
from text_generation_router.errors import ServingError, error_classes
from text_generation_router.request import ImageFile, PlacedImage, Request, RequestId
from text_generation_router.scheduling.messages import Deliveries
from text_generation_router.shards.listeners import Listeners
from text_generation_router.worker_link import link
from text_generation_router.worker_link.columns import WorkerDelivery
from text_generation_router.worker_link.convert import refusal_from_pb, refusal_to_pb, request_from_pb, request_to_pb
from text_generation_router.worker_link.link import DATA, DATA_BYTES, MAX_FRAME_BYTES, Link, LinkBroken
from text_generation_router.worker_link.remote_cluster import RemoteCluster

REASONS = st.sampled_from([None, None, None, *FinishReason])


def frame(message: pb.FromWorker | pb.FromScheduler) -> bytes:
    data = message.SerializeToString()
    return struct.pack("<I", len(data)) + data


@asynccontextmanager
async def link_of(got: list[pb.FromWorker]) -> AsyncIterator[Link[pb.FromWorker]]:
    """A connected link that keeps what it receives."""
    link = Link(pb.FromWorker, got.append, on_open=lambda: None, on_end=lambda: None)
    ours, theirs = socket.socketpair()
    with theirs:
        await asyncio.get_running_loop().create_connection(lambda: link, sock=ours)
        yield link
        link.close()


@given(st.lists(st.binary(max_size=300), max_size=5), st.lists(st.integers(1, 50), min_size=1))
async def test_messages_arrive_however_their_bytes_are_divided(names: list[bytes], sizes: list[int]) -> None:
    sent = [pb.FromWorker(submit=pb.Submit(request=number, tenant=name)) for number, name in enumerate(names)]
    stream = b"".join(map(frame, sent))
    got: list[pb.FromWorker] = []
    async with link_of(got) as link:
        start = 0
        while start < len(stream):
            size = sizes[start % len(sizes)]
            link.data_received(stream[start : start + size])
            start += size
        assert got == sent
        assert not link.closed


@pytest.mark.parametrize("pieces", [(4,), (1, 3), (3, 1), (1, 1, 1, 1)])
async def test_a_frame_beyond_the_limit_is_refused_by_its_length(pieces: tuple[int, ...]) -> None:
    length = iter(struct.pack("<I", MAX_FRAME_BYTES + 1))
    async with link_of([]) as link:
        for piece in pieces:
            assert not link.closed
            link.data_received(bytes(next(length) for _ in range(piece)))
        assert link.closed


@pytest.mark.parametrize("retry_after_s", [None, 0.0, 7.5])
def test_an_error_crosses_as_it_is(retry_after_s: float | None) -> None:
    for error in error_classes():
        if error.__module__ != ServingError.__module__ or error.__init__ is not ServingError.__init__:
            continue  # only an HTTP worker raises it
        sent = error("the text", retry_after_s=retry_after_s)
        got = refusal_from_pb(refusal_to_pb(sent))
        assert (type(got), str(got), got.retry_after_s) == (error, str(sent), sent.retry_after_s)


def test_a_prompt_crosses_with_its_images_and_prediction_and_equal_ones_are_there_once() -> None:
    image = PlacedImage(1, 2, ImageFile(b"1", b"red"))
    request = Request(RequestId(7), array("I", [5, 6, 6, 7]), max_new_tokens=2, media=(image,))
    request = replace(request, prediction=array("I", [5, 9]))
    first = request_from_pb(request_to_pb(request, RequestId(7)), [b"red"])
    again = request_from_pb(request_to_pb(request, RequestId(8)), [b"red"], first)
    blue = replace(request, media=(PlacedImage(1, 2, ImageFile(b"2", b"blue")),))
    other = request_from_pb(request_to_pb(blue, RequestId(9)), [b"blue"], first)
    assert first.media == (image,)
    assert again.media is first.media
    assert other.media == blue.media
    assert (first.prediction, again.prediction is first.prediction) == (request.prediction, True)
    expected = replace(request, prediction=array("I", [9]))
    assert request_from_pb(request_to_pb(expected, RequestId(10)), [b"red"], first).prediction == expected.prediction
    with pytest.raises(LinkBroken, match="without the data"):
        request_from_pb(request_to_pb(blue, RequestId(9)), [], first)


@pytest.mark.parametrize("sizes", [(0,), (1, DATA_BYTES - 1, DATA_BYTES, 0), (2 * DATA_BYTES + 5,)])
async def test_data_crosses_in_frames_before_its_message(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    sent = [bytes([size % 251]) * size for size in sizes]
    got = list[list[bytes]]()
    receiver = Link(pb.FromWorker, lambda _: got.append(receiver.data), lambda: None, lambda: None)
    sender = Link(pb.FromWorker, lambda _: None, lambda: None, lambda: None)
    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(lambda: receiver, str(tmp_path / "link"))
    await loop.create_unix_connection(lambda: sender, str(tmp_path / "link"))
    for data in sent:
        sender.send_data(data)
    sender.send(pb.FromWorker(cancel=pb.Cancel(request=1)))
    async with asyncio.timeout(10):
        while not got:  # noqa: ASYNC110 - it crosses a socket
            await asyncio.sleep(0)
    assert got == [sent]
    for end in (sender, receiver):
        end.close()
    server.close()


async def test_endless_data_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MAX_FRAME_BYTES", 3 * DATA_BYTES)
    part = struct.pack("<I", DATA | DATA_BYTES) + bytes(DATA_BYTES)
    async with link_of([]) as ours:
        for _ in range(3):
            ours.data_received(part)
        assert not ours.closed
        ours.data_received(part)
        assert ours.closed


class Worker:
    """The scheduler's end of one worker, and that worker."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cluster = RemoteCluster(path, 0, {})
        self.link = Link(pb.FromWorker, lambda message: None, self._open, on_end=lambda: None)

    def _open(self) -> None:
        state = pb.State(info=shard_pb2.InfoResponse(), pool=shard_pb2.WarmUpResponse())
        self.link.send(pb.FromScheduler(state=state))


SHARES = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 3), REASONS), min_size=1, max_size=8)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(SHARES, st.booleans(), st.data())
async def test_each_worker_gets_the_columns_of_its_requests(
    tmp_path: Path, shares: list[tuple[int, int, FinishReason | None]], scored: bool, data: st.DataObject
) -> None:
    single = data.draw(st.booleans())
    counts = [1 if single else count for _, count, _ in shares]
    total = sum(counts)
    report = shard_pb2.StepReport(
        slots=range(len(shares)),
        token_counts=[] if single else counts,
        token_ids=range(100, 100 + total),
        logprobs=np.arange(total, dtype=np.float32) / -8 if scored else [],
    )
    for slot in data.draw(st.sets(st.integers(0, len(shares) - 1))):
        index = data.draw(st.integers(0, counts[slot] - 1))
        report.top_tokens.add(slot=slot, index=index, token_ids=[slot, 7], logprobs=[-0.5, -slot])
    starts = [sum(counts[:slot]) for slot in range(len(shares))]
    deliveries = Deliveries(
        [(RequestId(slot), starts[slot], starts[slot] + counts[slot], shares[slot][2]) for slot in range(len(shares))]
    )
    direct, delivery = Listeners(lambda request_id: None), WorkerDelivery()
    asks = data.draw(st.integers(-1, len(shares) - 1))
    wanted, got = [Listener() for _ in shares], [Listener() for _ in shares]
    loop = asyncio.get_running_loop()
    workers = [Worker(tmp_path / f"{number}") for number in range(2)]
    for worker in workers:
        server = await loop.create_unix_server(lambda worker=worker: worker.link, str(worker.path))  # type: ignore[misc]
        await worker.cluster.link.joined()
        server.close()
    for slot, (number, _, _) in enumerate(shares):
        direct.add(RequestId(slot), wanted[slot], scored=slot == asks)
        delivery.add(RequestId(slot), workers[number].link, scored=slot == asks)
        workers[number].cluster.submit(Request(RequestId(slot), (1,), 100), got[slot])
    for each in (direct, delivery):
        each.predicted((RequestId(slot), slot + 2, slot) for slot in range(len(shares)))
        each.predicted([(None, 3, 1), (RequestId(99), 3, 1)])  # of requests that ended
        each.tokens(deliveries, list(report.token_ids), report)
    async with asyncio.timeout(10):
        while sum(len(each.events) for each in got) < total + len(shares):  # noqa: ASYNC110 - it crosses a socket
            await asyncio.sleep(0)
    assert [each.events for each in got] == [each.events for each in wanted]
    known = [event for each in wanted for event in each.events if isinstance(event[0], int) and event[1] != b"null"]
    assert len(known) == (total if scored and asks >= 0 else 0)  # they may be for audits alone
    live = sum(reason is None for _, _, reason in shares)
    assert live == len(delivery._receivers) == len(direct._receivers)
    assert live == sum(worker.cluster.live_requests for worker in workers)
    for worker in workers:
        worker.link.close()
