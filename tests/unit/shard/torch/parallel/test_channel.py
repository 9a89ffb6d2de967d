"""The control channel over real sockets: messages, greetings, lost processes."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from text_generation_common.shard_access import ShardAccess
from text_generation_common.sockets import PRIVATE_FOLDER_PREFIX
from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.parallel.channel import GOODBYE, FollowerChannel, GroupBroken, LeaderChannel
from text_generation_shard.engines.torch.parallel.meeting import accept_ranks, connect_to_leader

SOON = 10.0
NO_TOKEN = ShardAccess.of()


def accept(path: Path, size: int) -> LeaderChannel:
    return accept_ranks(f"unix://{path}", size, SOON, NO_TOKEN)


def connect(path: Path, rank: int, size: int) -> FollowerChannel:
    return connect_to_leader(f"unix://{path}", rank, size, SOON, NO_TOKEN)


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder, "group")


@contextmanager
def group(path: Path, size: int) -> Iterator[tuple[LeaderChannel, list[FollowerChannel]]]:
    """Connect a leader and its followers in one process."""
    with ThreadPoolExecutor(size) as pool:
        leading = pool.submit(accept, path, size)
        following = [pool.submit(connect, path, rank, size) for rank in reversed(range(1, size))]
        leader, followers = leading.result(), [future.result() for future in reversed(following)]
    try:
        yield leader, followers
    finally:
        leader.close()
        for follower in followers:
            follower.close()


@pytest.mark.parametrize("size", [2, 4])
def test_all_followers_receive_all_messages_in_order(path: Path, size: int) -> None:
    with socket.socket(socket.AF_UNIX) as crashed:  # its socket is replaced
        crashed.bind(str(path))
    # One message is larger than all buffers, the next one smaller.
    messages = [(3, b""), (1, bytearray(b"a")), (4, os.urandom(1 << 20)), (2, memoryview(os.urandom(4096)))]

    def read(follower: FollowerChannel) -> list[tuple[int, bytes]]:
        return [(kind, bytes(payload)) for kind, payload in (follower.receive() for _ in messages)]

    with group(path, size) as (leader, followers), ThreadPoolExecutor(size) as pool:
        reading = [pool.submit(read, follower) for follower in followers]
        for kind, payload in messages:
            leader.broadcast(kind, payload)
        assert [future.result() for future in reading] == [messages] * (size - 1)


def test_answers_are_gathered_by_rank(path: Path) -> None:
    with group(path, 4) as (leader, followers):
        for follower, value in zip(reversed(followers), (3, -(1 << 62), 1), strict=True):
            follower.answer(value)
        assert leader.gather() == [1, -(1 << 62), 3]


def test_only_the_owner_can_access_the_socket_which_is_removed_once_all_are_connected(path: Path) -> None:
    private = path.parent / f"{PRIVATE_FOLDER_PREFIX}1" / "group"
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(accept, private, 3)
        first = connect(private, 1, 3)
        assert private.stat().st_mode & 0o777 == 0o600
        second = connect(private, 2, 3)
        for channel in (leading.result(), first, second):
            assert list(path.parent.iterdir()) == []
            channel.close()


def test_a_lost_follower_is_named_and_a_leader_that_closes_says_goodbye(path: Path) -> None:
    with group(path, 3) as (leader, (first, second)):
        first.answer(1)
        second.close()
        with pytest.raises(GroupBroken, match=r"^rank 2 is gone$"):
            leader.gather()
        with pytest.raises(GroupBroken, match=r"^rank 2 is gone"):
            leader.broadcast(1)
        with pytest.raises(GroupBroken):
            second.receive()
    with group(path, 2) as (leader, (follower,)):
        leader.close()
        assert follower.receive()[0] == GOODBYE
        with pytest.raises(GroupBroken, match=r"^rank 0 is gone$"):
            follower.receive()


def test_lost_reports_the_lost_process(path: Path) -> None:
    with group(path, 3) as (leader, (first, second)):
        assert leader.lost(0.0) is None
        assert second.lost(0.0) is None
        with ThreadPoolExecutor(1) as pool:
            lost = pool.submit(leader.lost, SOON)
            second.close()
            assert lost.result() == "rank 2 is gone"
        assert second.lost(SOON) is None
        leader.close()  # its goodbye is not read
        assert first.lost(SOON) == "rank 0 is gone"
        assert leader.lost(SOON) is None


def watches() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "group watch"]


def test_closing_is_not_reported_to_oneself(path: Path) -> None:
    reported: list[str] = []
    with group(path, 3) as (leader, followers):
        leader.watch(reported.append)
        followers[0].watch(reported.append)
        followers[0].close()  # ends the leader's watch thread
        for thread in watches():
            thread.join(SOON)
            assert not thread.is_alive()
    assert reported == ["rank 1 is gone"]


def test_followers_that_leave_at_shutdown_are_not_reported(path: Path) -> None:
    reported: list[str] = []
    with group(path, 3) as (leader, (first, second)), ThreadPoolExecutor(1) as pool:
        leader.watch(reported.append)
        (watch,) = watches()
        fill(leader, 2)  # sending GOODBYE to rank 2 blocks until it reads; rank 1 leaves meanwhile
        leaving = pool.submit(leader.close)
        assert first.receive()[0] == GOODBYE
        first.close()
        watch.join(SOON)
        assert not leaving.done()
        second.close()
        leaving.result(SOON)
    assert reported == []


def fill(leader: LeaderChannel, rank: int) -> None:
    """Send until the socket buffer is full."""
    connection = leader._peers[rank - 1]._socket
    connection.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            connection.send(bytes(4096))
    connection.setblocking(True)


@pytest.mark.parametrize(
    ("greetings", "problem"),
    [
        ([(1, 3), (1, 3)], "rank 1 connected twice"),
        ([(3, 3)], "rank 3 is not in a group of 3"),
        ([(0, 3)], "rank 0 is not in a group of 3"),
        ([(1, 2)], "rank 1 has world size 2, expected 3"),
    ],
)
def test_a_rank_outside_the_group_is_refused(path: Path, greetings: list[tuple[int, int]], problem: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(accept, path, 3)
        connected = [connect(path, rank, size) for rank, size in greetings]
        with pytest.raises(EngineError, match=f"^the group could not be formed: {problem}$"):
            leading.result()
        for follower in connected:  # none of them hangs
            with pytest.raises(GroupBroken):
                follower.receive()
            follower.close()
