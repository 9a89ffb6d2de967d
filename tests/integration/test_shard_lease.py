"""The Run stream is the lease of a shard: it is free again soon after the host of its router vanished."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

FREE_AFTER_S = 10.0
SHARD, ROUTER = "10.89.14.1", "10.89.14.2"
ADDRESS = f"{SHARD}:50051"

HOLDER = """
import asyncio, sys
from text_generation_proto.client import ShardClient

async def main():
    async with ShardClient.connect(sys.argv[1]) as shard:
        await shard.ready(60)
        async with shard.session(await shard.warm_up()) as session:
            tokens = session.generate([1, 2], max_new_tokens=30_000)
            await anext(tokens)
            if sys.argv[2] == "idle":
                await tokens.aclose()
            print("driven", flush=True)
            async for _ in tokens:
                pass
            await asyncio.sleep(600)

asyncio.run(main())
"""
WAITER = """
import asyncio, sys
from text_generation_proto.client import ShardClient

async def main():
    async with ShardClient.connect(sys.argv[1]) as shard:
        await shard.ready(60)
        await shard.warm_up()
        while ("x-session", "open") not in tuple(await (call := shard.run()).initial_metadata() or ()):
            assert "another Run session is open" in await call.details(), await call.details()
            print("held", flush=True)
            await asyncio.sleep(0.1)
    print("free", flush=True)

asyncio.run(main())
"""


def ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True, capture_output=True)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Network namespaces of a shard and of a router, with a link between them."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip (iproute2)")
    names = (f"shard-{os.getpid()}", f"router-{os.getpid()}")
    with ExitStack() as undo:
        try:
            for name in names:
                ip("netns", "add", name)
                undo.callback(ip, "netns", "delete", name)
            ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made: {error.stderr.decode().strip()}")
        for name, address in zip(names, (SHARD, ROUTER), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for link in ("eth0", "lo"):
                ip("-n", name, "link", "set", link, "up")
        yield names


@contextmanager
def started(namespace: str, *command: str | Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        ("ip", "netns", "exec", namespace, *command), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    """Read the output of a process up to this line."""
    assert process.stdout is not None
    assert any(each == f"{line}\n" for each in process.stdout), f"it ended without {line!r}"


@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.parametrize("load", ["idle", "streaming"])
def test_a_shard_is_free_soon_after_the_host_of_its_router_vanished(namespaces: tuple[str, str], load: str) -> None:
    shard_host, router_host = namespaces
    shard = Path(sys.executable).with_name("text-generation-shard")
    flags = ("--engine=echo", "--echo-step-ms=5", f"--address={ADDRESS}", "--insecure")
    with (
        started(shard_host, shard, *flags),
        started(router_host, sys.executable, "-c", HOLDER, ADDRESS, load) as holder,
    ):
        wait_for(holder, "driven")
        with started(shard_host, sys.executable, "-c", WAITER, ADDRESS) as waiter:
            wait_for(waiter, "held")
            ip("-n", router_host, "link", "set", "eth0", "down")
            vanished = time.monotonic()
            wait_for(waiter, "free")
            seconds = time.monotonic() - vanished
    print(f"{load}: free after {seconds:.1f} s")
    assert seconds <= FREE_AFTER_S
