"""Network namespaces as hosts with a network between them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest


def ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True, capture_output=True)


@contextmanager
def two_hosts(*addresses: str) -> Iterator[list[tuple[str, ...]]]:
    """Yield the commands that run a command on each of two hosts with these addresses; the last word is the namespace.

    Skips the test where namespaces cannot be made.
    """
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip (iproute2)")
    names = [f"host{number}-{os.getpid()}" for number in range(2)]
    with ExitStack() as undo:
        try:
            for name in names:
                ip("netns", "add", name)
                undo.callback(ip, "netns", "delete", name)
            ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made: {error.stderr.decode().strip()}")
        for name, address in zip(names, addresses, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for link in ("eth0", "lo"):
                ip("-n", name, "link", "set", link, "up")
        yield [("ip", "netns", "exec", name) for name in names]
