"""The engine of a follower: it executes the leader's commands and ends with the group."""

from __future__ import annotations

import queue
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import structlog

from text_generation_proto.values import WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError, Orders
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.parallel.channel import LeaderChannel
from text_generation_shard.engines.torch.parallel.follower import FollowerEngine
from text_generation_shard.engines.torch.parallel.meeting import accept_ranks, connect_to_leader

SOON = 10.0
STUCK = 99


@dataclass
class RecordingWorker:
    """A worker that records commands and replies to some."""

    received: queue.SimpleQueue[tuple[int, bytes]] = field(default_factory=queue.SimpleQueue)
    released: threading.Event = field(default_factory=threading.Event)

    def execute(self, kind: int, payload: memoryview) -> int | None:
        self.received.put((kind, bytes(payload)))
        if kind == STUCK:
            self.released.wait()
        if kind == 13:
            raise ValueError("no such\nkind")
        return len(payload) if kind == 5 else None


@dataclass
class Pair:
    """A leader's channel and the follower engine at its other end."""

    leader: LeaderChannel
    worker: RecordingWorker
    engine: FollowerEngine
    reasons: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)


@pytest.fixture
def unwatched() -> Iterator[Pair]:
    """A pair without a callback for the end of the group."""
    config = ShardConfig(engine="echo")
    info = build_engine(config).info
    with tempfile.TemporaryDirectory(prefix="t-") as folder, ThreadPoolExecutor(1) as pool:
        address = f"unix://{folder}/group"
        leading = pool.submit(accept_ranks, address, 2, SOON, config)
        worker = RecordingWorker()
        engine = FollowerEngine(info, 1, connect_to_leader(address, 1, 2, SOON, config), worker.execute)
        pair = Pair(leading.result(), worker, engine)
        yield pair
        worker.released.set()
        engine.close()
        pair.leader.close()


@pytest.fixture
def pair(unwatched: Pair) -> Pair:
    unwatched.engine.on_broken(unwatched.reasons.put)
    return unwatched


def test_commands_are_executed_and_answered_and_calls_of_a_router_refused(pair: Pair) -> None:
    pair.leader.broadcast(2, b"step")
    pair.leader.broadcast(5, b"123")
    assert pair.leader.gather() == [3]
    assert [pair.worker.received.get(timeout=SOON) for _ in range(2)] == [(2, b"step"), (5, b"123")]
    for call in (lambda: pair.engine.warm_up(WarmUpLimits()), lambda: pair.engine.apply(Orders(number=1))):
        with pytest.raises(EngineError, match=r"^rank 1 follows: call rank 0$"):
            call()
    assert pair.engine.step() is None
    assert pair.reasons.empty()


def test_a_step_that_fails_ends_the_follower(pair: Pair) -> None:
    with structlog.testing.capture_logs() as logs:
        pair.leader.broadcast(13)
        assert pair.reasons.get(timeout=SOON) == "ValueError: no such kind"
    assert [record["event"] for record in logs] == ["the follower failed"]


def test_a_goodbye_ends_the_follower_without_an_error(pair: Pair) -> None:
    with structlog.testing.capture_logs() as logs:
        pair.leader.broadcast(STUCK)
        assert pair.worker.received.get(timeout=SOON)[0] == STUCK
        pair.leader.close()
        # The loss is detected at once, the goodbye is read after the step.
        with pytest.raises(queue.Empty):
            pair.reasons.get(timeout=0.2)
        pair.worker.released.set()
        assert pair.reasons.get(timeout=SOON) == "rank 0 has left"
    assert logs == []


@pytest.mark.parametrize("registered_first", [True, False])
def test_a_lost_leader_ends_the_follower(unwatched: Pair, registered_first: bool) -> None:
    with structlog.testing.capture_logs() as logs:
        if registered_first:
            unwatched.engine.on_broken(unwatched.reasons.put)
        for peer in unwatched.leader._peers:  # like a kill: no goodbye
            peer.close()
        unwatched.engine._thread.join(SOON)
        if not registered_first:
            unwatched.engine.on_broken(unwatched.reasons.put)
        assert unwatched.reasons.get(timeout=SOON) == "rank 0 is gone"
    assert [(record["event"], record["reason"]) for record in logs] == [("the group is broken", "rank 0 is gone")]


def test_a_follower_blocked_in_a_step_ends_too(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("text_generation_shard.engines.torch.parallel.follower.STUCK_AFTER", 0.05)
    pair.leader.broadcast(STUCK)
    assert pair.worker.received.get(timeout=SOON)[0] == STUCK
    pair.leader.close()
    assert pair.reasons.get(timeout=SOON) == "rank 0 is gone"


def test_close_reports_nothing(pair: Pair) -> None:
    with structlog.testing.capture_logs() as logs:
        pair.engine.close()
        for thread in threading.enumerate():
            assert thread.name != "engine follower"
            if thread.name == "group watch":
                thread.join(SOON)
    assert pair.reasons.empty()
    assert logs == []
