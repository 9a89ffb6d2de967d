from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from text_generation_common.sockets import PRIVATE_FOLDER_PREFIX, SocketInUse, claim_socket, remove_socket
from text_generation_proto.addresses import join_host_port, socket_path, split_host_port


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: the path of a unix socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="t-") as name:
        yield Path(name)


def stale_socket(path: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    return path


def test_only_unix_addresses_have_a_path() -> None:
    assert socket_path("unix:///tmp/x") == Path("/tmp/x")
    assert socket_path("127.0.0.1:5000") is None


@pytest.mark.parametrize(("host", "port"), [("10.0.0.1", 1), ("head.set", 65535), ("::1", 80), ("fe80::1%eth0", 80)])
def test_an_address_is_split_into_the_host_and_port_it_was_joined_of(host: str, port: int) -> None:
    assert split_host_port(join_host_port(host, port)) == (host, port)


@pytest.mark.parametrize(
    "address", ["10.0.0.1", ":80", "a:0", "a:65536", "a:x", "::1:80", "[x]:80", "a b:80", "a:80\n"]
)
def test_other_texts_are_no_host_and_port(address: str) -> None:
    with pytest.raises(ValueError, match="is not host:port"):
        split_host_port(address)


def test_claim_socket_says_why_none_can_be_created(folder: Path) -> None:
    with pytest.raises(SocketInUse, match=r"^no socket can be created at /nowhere/s: No such file or directory$"):
        claim_socket(Path("/nowhere/s"))
    with pytest.raises(SocketInUse, match=r": AF_UNIX path too long$"):
        claim_socket(folder / ("s" * 108))
    claim_socket(folder / "s")
    assert list(folder.iterdir()) == []


def test_claim_socket_removes_a_stale_socket(folder: Path) -> None:
    path = stale_socket(folder / "s")
    claim_socket(path)
    assert not path.exists()
    claim_socket(path)


def test_claim_socket_removes_neither_a_served_socket_nor_another_kind_of_file(folder: Path) -> None:
    path, file = folder / "s", folder / "f"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        with pytest.raises(SocketInUse, match="a server already listens"):
            claim_socket(path)
    assert path.exists()
    file.write_text("precious")
    with pytest.raises(SocketInUse, match="is not a socket"):
        claim_socket(file)
    assert file.read_text() == "precious"
    with pytest.raises(SocketInUse, match="cannot be created: No such file"):
        claim_socket(folder / "missing" / f"{PRIVATE_FOLDER_PREFIX}x" / "s")


def test_private_folder_is_created_with_its_first_socket_and_removed_with_its_last(folder: Path) -> None:
    private = folder / f"{PRIVATE_FOLDER_PREFIX}x"
    for name in ("1", "2"):
        claim_socket(private / name)
    assert private.stat().st_mode & 0o777 == 0o700
    one, two = stale_socket(private / "1"), stale_socket(private / "2")
    remove_socket(one)
    assert private.exists()
    remove_socket(two)
    assert not private.exists()
    remove_socket(two)


def test_remove_socket_keeps_an_ordinary_folder(folder: Path) -> None:
    remove_socket(stale_socket(folder / "s"))
    assert folder.exists()
