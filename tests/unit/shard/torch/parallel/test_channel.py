"""The control channel, over real sockets: what arrives, who may come, who notices that somebody is gone."""

from __future__ import annotations

import os
import queue
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from text_generation_proto.sockets import PRIVATE_FOLDER_PREFIX
from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.cuda.parallel.channel import (
    GOODBYE,
    FollowerChannel,
    GroupBroken,
    LeaderChannel,
    accept_followers,
    connect_to_leader,
)

SOON = 10.0


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder, "group")


@contextmanager
def group(path: Path, size: int) -> Iterator[tuple[LeaderChannel, list[FollowerChannel]]]:
    """A leader and its followers, in the threads of one process."""
    with ThreadPoolExecutor(size) as pool:
        leading = pool.submit(accept_followers, path, size, SOON)
        following = [pool.submit(connect_to_leader, path, rank, size, SOON) for rank in reversed(range(1, size))]
        leader, followers = leading.result(), [one.result() for one in reversed(following)]
    try:
        yield leader, followers
    finally:
        leader.close()
        for follower in followers:
            follower.close()


@pytest.mark.parametrize("size", [2, 4])
def test_what_the_leader_says_all_followers_hear_in_order(path: Path, size: int) -> None:
    # Larger than any buffer on the way, and the next one smaller again.
    messages = [(3, b""), (1, b"a"), (4, os.urandom(1 << 20)), (2, os.urandom(4096))]

    def hear(follower: FollowerChannel) -> list[tuple[int, bytes]]:
        return [(kind, bytes(payload)) for kind, payload in (follower.receive() for _ in messages)]

    with group(path, size) as (leader, followers), ThreadPoolExecutor(size) as pool:
        hearing = [pool.submit(hear, follower) for follower in followers]
        for kind, payload in messages:
            leader.broadcast(kind, payload)
        assert [one.result() for one in hearing] == [messages] * (size - 1)


def test_answers_are_gathered_by_rank(path: Path) -> None:
    with group(path, 4) as (leader, followers):
        for follower, value in zip(reversed(followers), (3, -(1 << 62), 1), strict=True):
            follower.answer(value)
        assert leader.gather() == [1, -(1 << 62), 3]


def test_any_bytes_can_be_sent(path: Path) -> None:
    with group(path, 2) as (leader, (follower,)):
        for payload in (b"abc", bytearray(b"abc"), memoryview(b"abc")):
            leader.broadcast(7, payload)
            kind, received = follower.receive()
            assert (kind, bytes(received)) == (7, b"abc")


def test_nothing_is_left_in_the_file_system_once_all_have_met(path: Path) -> None:
    private = path.parent / f"{PRIVATE_FOLDER_PREFIX}1" / "group"
    with group(private, 2):
        assert list(path.parent.iterdir()) == []


def test_the_socket_is_for_its_owner_alone(path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(accept_followers, path, 3, SOON)
        first = connect_to_leader(path, 1, 3, SOON)
        assert path.stat().st_mode & 0o777 == 0o600
        second = connect_to_leader(path, 2, 3, SOON)
        leading.result().close()
    first.close()
    second.close()


def test_a_leader_that_leaves_says_goodbye_and_then_nothing_more(path: Path) -> None:
    with group(path, 2) as (leader, (follower,)):
        leader.close()
        assert follower.receive()[0] == GOODBYE
        with pytest.raises(GroupBroken, match=r"^rank 0 is gone$"):
            follower.receive()


def test_a_leader_notices_that_a_follower_is_gone(path: Path) -> None:
    with group(path, 3) as (leader, (_, second)):
        second.close()
        with pytest.raises(GroupBroken, match=r"^rank 2 is gone"):
            leader.broadcast(1)
        with pytest.raises(GroupBroken):
            second.receive()


def test_who_is_lost_is_known_or_seen_soon(path: Path) -> None:
    with group(path, 3) as (leader, (first, second)):
        assert leader.lost(0.0) is None
        assert second.lost(0.0) is None
        with ThreadPoolExecutor(1) as pool:
            seen = pool.submit(leader.lost, SOON)
            second.close()
            assert seen.result() == "rank 2 is gone"
        assert second.lost(SOON) is None
        leader.close()
        assert first.lost(SOON) == "rank 0 is gone"
        assert leader.lost(SOON) is None


def test_gathering_ends_when_a_follower_is_gone(path: Path) -> None:
    with group(path, 3) as (leader, (first, second)):
        first.answer(1)
        second.close()
        with pytest.raises(GroupBroken, match=r"^rank 2 is gone$"):
            leader.gather()


FOLLOWER = """
import sys
from pathlib import Path
from text_generation_shard.engines.torch.cuda.parallel.channel import connect_to_leader
follower = connect_to_leader(Path(sys.argv[1]), 1, 2, 30)
while True:
    kind, payload = follower.receive()
    follower.answer(len(payload))
"""


def test_a_process_that_is_killed_is_noticed_by_who_waits_and_by_who_does_nothing(path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", FOLLOWER, str(path)])
    try:
        leader = accept_followers(path, 2, 30)
        gone: queue.SimpleQueue[str] = queue.SimpleQueue()
        leader.watch(gone.put)
        leader.broadcast(1, b"12345")
        assert leader.gather() == [5]
        assert gone.empty()
        process.kill()
        assert gone.get(timeout=SOON) == "rank 1 is gone"
        with pytest.raises(GroupBroken, match=r"^rank 1 is gone"):
            leader.gather()
        leader.close()
    finally:
        process.kill()
        process.wait()


def test_a_follower_that_does_not_read_is_told_that_the_leader_is_gone(path: Path) -> None:
    with group(path, 2) as (leader, (follower,)):
        leader.broadcast(1, b"not read")
        gone: queue.SimpleQueue[str] = queue.SimpleQueue()
        follower.watch(gone.put)
        leader.close()
        assert gone.get(timeout=SOON) == "rank 0 is gone"


def test_nobody_is_told_of_an_end_of_ones_own(path: Path) -> None:
    told: list[str] = []
    with group(path, 3) as (leader, followers):
        leader.watch(told.append)
        followers[0].watch(told.append)
        followers[0].close()  # the leader's thread ends with that of the first that is gone
        watches = [thread for thread in threading.enumerate() if thread.name == "group watch"]
        for thread in watches:
            thread.join(SOON)
            assert not thread.is_alive()
    assert told == ["rank 1 is gone"]


def test_a_leader_that_leaves_is_not_told_that_the_others_do(path: Path) -> None:
    told: list[str] = []
    with group(path, 3) as (leader, (first, second)), ThreadPoolExecutor(1) as pool:
        leader.watch(told.append)
        (watch,) = (thread for thread in threading.enumerate() if thread.name == "group watch")
        fill(leader, 2)  # the goodbye to rank 2 takes until it reads; rank 1 goes meanwhile
        leaving = pool.submit(leader.close)
        assert first.receive()[0] == GOODBYE
        first.close()
        watch.join(SOON)
        assert not leaving.done()
        second.close()
        leaving.result(SOON)
    assert told == []


def fill(leader: LeaderChannel, rank: int) -> None:
    """Send until the kernel takes no more."""
    connection = leader._followers[rank]._socket
    connection.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            connection.send(bytes(4096))
    connection.setblocking(True)


def test_a_follower_that_does_not_come_is_named(path: Path) -> None:
    with pytest.raises(EngineError, match=r"^ranks 1, 2 did not connect within 0\.05 s$"):
        accept_followers(path, 3, 0.05)
    assert not path.exists()


def test_a_leader_that_is_not_there_is_waited_for_and_then_named(path: Path) -> None:
    with pytest.raises(EngineError, match=rf"^rank 0 was not reachable at {path} within 0\.05 s: No such file"):
        connect_to_leader(path, 1, 2, 0.05)


def test_a_socket_that_a_crash_left_makes_way(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as crashed:
        crashed.bind(str(path))
    with group(path, 2) as (leader, (follower,)):
        leader.broadcast(5)
        assert follower.receive()[0] == 5


@pytest.mark.parametrize(
    ("greetings", "problem"),
    [
        ([(1, 3), (1, 3)], "rank 1 connected twice"),
        ([(3, 3)], "rank 3 is not in a group of 3"),
        ([(0, 3)], "rank 0 is not in a group of 3"),
        ([(1, 2)], "rank 1 has world size 2, expected 3"),
    ],
)
def test_who_has_no_place_in_the_group_is_refused(path: Path, greetings: list[tuple[int, int]], problem: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(accept_followers, path, 3, SOON)
        came = [connect_to_leader(path, rank, size, SOON) for rank, size in greetings]
        with pytest.raises(EngineError, match=f"^the group could not be formed: {problem}$"):
            leading.result()
        for follower in came:  # nobody is left waiting
            with pytest.raises(GroupBroken):
                follower.receive()
            follower.close()


@pytest.mark.parametrize("words", [b"", b"GET", struct.pack("<III", 7, 1, 2)])
def test_what_is_no_shard_is_refused(path: Path, words: bytes) -> None:
    with ThreadPoolExecutor(1) as pool, socket.socket(socket.AF_UNIX) as stranger:
        leading = pool.submit(accept_followers, path, 2, SOON)
        while stranger.connect_ex(str(path)):
            pass
        stranger.sendall(words)
        stranger.shutdown(socket.SHUT_WR)
        with pytest.raises(EngineError, match=r"a connection did not come from a shard$"):
            leading.result()
