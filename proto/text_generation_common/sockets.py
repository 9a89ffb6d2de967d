"""Unix sockets of servers: claimed before listening, removed after stopping.

The launcher puts its shards' sockets in a private folder that it only names. `claim_socket` creates the folder and
`remove_socket` removes it when it is empty. It thus exists only while a process lives that will remove it, and nothing
stays in the file system even if the launcher is killed.
"""

import os
import socket
import struct
from pathlib import Path

from text_generation_common.exit_codes import CannotServe

PRIVATE_FOLDER_PREFIX = "tgi-sockets-"
"""Prefix of the name of a folder that holds only the sockets of one launcher's shards."""


class SocketInUse(CannotServe):
    """The path of a socket cannot be used: it is taken by a running server, another user or another kind of file, or no socket
    can be created there."""


def claim_socket(path: Path) -> None:
    """Prepare to listen on a socket: create its folder if it is a private one, remove a stale socket.

    Raises SocketInUse. gRPC would remove the file unconditionally, and so take the socket from a running server.
    """
    if path.parent.name.startswith(PRIVATE_FOLDER_PREFIX):
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise SocketInUse(f"{path.parent} cannot be created: {error.strerror}") from error
        if path.parent.stat().st_uid != os.geteuid():
            raise SocketInUse(f"{path.parent} belongs to another user")
    if not path.is_socket():
        if path.exists():
            raise SocketInUse(f"{path} exists and is not a socket")
        _check_place(path)
        return
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except FileNotFoundError:
            pass
        else:
            raise SocketInUse(f"a server already listens on {path}")


def _check_place(path: Path) -> None:
    """Create and remove a socket at this path. gRPC would not say why it cannot, and would write lines of its own."""
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(path))
        path.unlink()
    except OSError as error:
        raise SocketInUse(f"no socket can be created at {path}: {error.strerror or error}") from error


def peer_user(connection: socket.socket) -> int:
    """Return the user of the process at the other end of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)  # process, user, group
    return int(struct.unpack("iII", credentials)[1])


def remove_socket(path: Path) -> None:
    """Remove the socket of a stopped server, and its folder if that is a private one and empty."""
    path.unlink(missing_ok=True)
    if path.parent.name.startswith(PRIVATE_FOLDER_PREFIX):
        try:
            path.parent.rmdir()
        except OSError:  # it holds another shard's socket, or is gone already
            return
