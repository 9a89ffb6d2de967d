"""The engine of a follower: it does what the leader says, and is gone when there is nobody to follow."""

from __future__ import annotations

import queue
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import structlog

from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError, Orders, WarmUpLimits
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.cuda.parallel.channel import LeaderChannel, accept_followers, connect_to_leader
from text_generation_shard.engines.torch.cuda.parallel.follower import FollowerEngine

SOON = 10.0
STUCK = 99


@dataclass
class RecordingWorker:
    """An executor that keeps what it was told, and answers by request."""

    heard: queue.SimpleQueue[tuple[int, bytes]] = field(default_factory=queue.SimpleQueue)
    released: threading.Event = field(default_factory=threading.Event)

    def execute(self, kind: int, payload: memoryview) -> int | None:
        self.heard.put((kind, bytes(payload)))
        if kind == STUCK:
            self.released.wait()
        if kind == 13:
            raise ValueError("no such\nkind")
        return len(payload) if kind == 5 else None


@dataclass
class Pair:
    """A leader's channel, and a follower at its other end."""

    leader: LeaderChannel
    executor: RecordingWorker
    engine: FollowerEngine
    reasons: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)


@pytest.fixture
def pair() -> Iterator[Pair]:
    info = build_engine(ShardConfig(engine="echo")).info
    with tempfile.TemporaryDirectory(prefix="t-") as folder, ThreadPoolExecutor(1) as pool:
        path = Path(folder, "group")
        leading = pool.submit(accept_followers, path, 2, SOON)
        executor = RecordingWorker()
        engine = FollowerEngine(info, 1, connect_to_leader(path, 1, 2, SOON), executor)
        pair = Pair(leading.result(), executor, engine)
        pair.engine.on_broken(pair.reasons.put)
        yield pair
        executor.released.set()
        engine.close()
        pair.leader.close()


def test_what_the_leader_says_is_done_and_answered(pair: Pair) -> None:
    pair.leader.broadcast(2, b"step")
    pair.leader.broadcast(5, b"123")
    assert pair.leader.gather() == [3]
    assert [pair.executor.heard.get(timeout=SOON) for _ in range(2)] == [(2, b"step"), (5, b"123")]
    assert pair.reasons.empty()


@pytest.mark.parametrize(
    "call",
    [lambda engine: engine.warm_up(WarmUpLimits()), lambda engine: engine.apply(Orders(number=1))],
    ids=["warm up", "orders"],
)
def test_nobody_else_is_obeyed(pair: Pair, call: Callable[[FollowerEngine], object]) -> None:
    with pytest.raises(EngineError, match=r"^rank 1 follows: call rank 0$"):
        call(pair.engine)
    assert pair.engine.step() is None


def test_a_step_that_fails_ends_the_follower(pair: Pair) -> None:
    with structlog.testing.capture_logs() as logs:
        pair.leader.broadcast(13)
        assert pair.reasons.get(timeout=SOON) == "ValueError: no such kind"
    assert [record["event"] for record in logs] == ["the follower failed"]


def test_a_goodbye_ends_the_follower_without_an_error(pair: Pair) -> None:
    with structlog.testing.capture_logs() as logs:
        pair.leader.broadcast(STUCK)
        assert pair.executor.heard.get(timeout=SOON)[0] == STUCK
        pair.leader.close()
        # That the leader is gone is seen at once, that it said goodbye only after the step.
        with pytest.raises(queue.Empty):
            pair.reasons.get(timeout=0.2)
        pair.executor.released.set()
        assert pair.reasons.get(timeout=SOON) == "rank 0 has left"
    assert logs == []


def test_a_leader_that_is_gone_ends_the_follower(pair: Pair) -> None:
    with structlog.testing.capture_logs() as logs:
        for peer in pair.leader._followers.values():  # as a kill does: no goodbye
            peer.close()
        assert pair.reasons.get(timeout=SOON) == "rank 0 is gone"
        pair.engine._thread.join(SOON)
    assert [(record["event"], record["reason"]) for record in logs] == [("the group is broken", "rank 0 is gone")]
    late: list[str] = []
    pair.engine.on_broken(late.append)
    assert late == ["rank 0 is gone"]


def test_one_that_hangs_in_a_step_ends_all_the_same(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("text_generation_shard.engines.torch.cuda.parallel.follower.STUCK_AFTER", 0.05)
    pair.leader.broadcast(STUCK)
    assert pair.executor.heard.get(timeout=SOON)[0] == STUCK
    pair.leader.close()
    assert pair.reasons.get(timeout=SOON) == "rank 0 is gone"


def test_closing_ends_it_quietly(pair: Pair) -> None:
    with structlog.testing.capture_logs() as logs:
        pair.engine.close()
        for thread in threading.enumerate():
            assert thread.name != "engine follower"
            if thread.name == "group watch":
                thread.join(SOON)
    assert pair.reasons.empty()
    assert logs == []
