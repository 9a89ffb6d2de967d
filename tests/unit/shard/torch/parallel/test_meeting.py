"""The meeting of ranks on several hosts: who is let in, and who is not."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from certificates import write_certificates

from text_generation_common.shard_access import ShardAccess
from text_generation_proto.addresses import split_host_port
from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.parallel import meeting
from text_generation_shard.engines.torch.parallel.channel import GroupBroken, LeaderChannel

SOON = 20.0
"""Seconds; far more than needed."""
MEMBER = ShardAccess.of(shard_token="a-token")


@pytest.fixture
def address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def leading(pool: ThreadPoolExecutor, address: str, size: int, access: ShardAccess = MEMBER) -> Future[LeaderChannel]:
    return pool.submit(meeting.accept_ranks, address, size, SOON, access)


def stranger(address: str, *sends: bytes) -> socket.socket:
    """Return a connection to the meeting, once rank 0 listens, that has sent this."""
    while True:
        try:
            connection = socket.create_connection(split_host_port(address), timeout=SOON)
        except ConnectionRefusedError:
            continue
        for message in sends:
            connection.sendall(message)
        return connection


@pytest.mark.parametrize("tls", [False, True])
def test_members_meet_and_talk_among_strangers(
    address: str, pool: ThreadPoolExecutor, tmp_path: Path, *, tls: bool
) -> None:
    """Neither a silent stranger, nor noise, nor a wrong token keeps the members apart or gets in."""
    access = write_certificates(tmp_path, MEMBER.shard_token) if tls else MEMBER
    leader = leading(pool, address, 3, access)
    with stranger(address), stranger(address, b"GET / HTTP/1.1\r\n\r\n" * 9) as noise:
        with suppress(ConnectionResetError):
            while noise.recv(1 << 16):  # the challenge, then the end
                pass
        with pytest.raises(EngineError, match="is SHARD_TOKEN the same"):
            wrong = access.model_copy(update={"shard_token": "other"})
            meeting.connect_to_leader(address, 1, 3, 0.0, wrong)
        followers = list(pool.map(lambda rank: meeting.connect_to_leader(address, rank, 3, SOON, access), (1, 2)))
        leader.result().broadcast(7, payload := bytes(range(256)) * 1000)
        for number, follower in enumerate(followers):
            kind, received = follower.receive()
            assert (kind, bytes(received)) == (7, payload)
            follower.answer(number)
        assert leader.result().gather() == [0, 1]
    with pytest.raises(ConnectionRefusedError):  # complete: rank 0 listens no more
        socket.create_connection(split_host_port(address), timeout=SOON)
    for channel in (leader.result(), *followers):
        channel.close()


def test_certificate_of_another_authority_is_refused(address: str, pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    access = write_certificates(tmp_path / "ours", MEMBER.shard_token)
    other = write_certificates(tmp_path / "theirs", MEMBER.shard_token)
    leader = leading(pool, address, 2, access)
    mixed = other.model_copy(update={"shard_tls_ca": access.shard_tls_ca})
    for refused, reason in ((other, "certificate verify failed"), (mixed, "could not be met")):
        with stranger(address), pytest.raises(EngineError, match=reason):
            meeting.connect_to_leader(address, 1, 2, 0.0, refused)
    meeting.connect_to_leader(address, 1, 2, SOON, access).close()
    leader.result().close()


def test_rank_that_restarts_before_the_group_is_complete_meets_again(address: str, pool: ThreadPoolExecutor) -> None:
    leader = leading(pool, address, 3)
    meeting.connect_to_leader(address, 1, 3, SOON, MEMBER).close()
    followers = list(pool.map(lambda rank: meeting.connect_to_leader(address, rank, 3, SOON, MEMBER), (1, 2)))
    leader.result().broadcast(1)
    assert [follower.receive()[0] for follower in followers] == [1, 1]
    for channel in (leader.result(), *followers):
        channel.close()


def test_all_ranks_end_when_one_is_lost(address: str, pool: ThreadPoolExecutor) -> None:
    leader = leading(pool, address, 3)
    first, second = pool.map(lambda rank: meeting.connect_to_leader(address, rank, 3, SOON, MEMBER), (1, 2))
    lost: Future[str] = Future()
    leader.result().watch(lost.set_result)
    first.close()
    assert lost.result(SOON) == "rank 1 is gone"
    with pytest.raises(GroupBroken, match="rank 0 is gone"):
        second.receive()
    assert leader.result().lost(0.0) == "rank 1 is gone"
    second.close()
