"""The Run stream is the lease of a shard: it is free again soon after the host of its router vanished."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from network_namespaces import ip, two_hosts

FREE_AFTER_S = 10.0
SHARD, ROUTER = "10.89.14.1", "10.89.14.2"
ADDRESS = f"{SHARD}:50051"

HOLDER = """
import asyncio, sys
from text_generation_proto.client import ShardClient
from text_generation_proto.v1 import shard_pb2 as pb

async def main():
    async with ShardClient.connect(sys.argv[1]) as shard:
        await shard.ready(60)
        await shard.warm_up()
        call = shard.run()
        new = 1 if sys.argv[2] == "idle" else 30_000
        sequence = pb.NewSequence(prompt=[1, 2], blocks=range(2000), stopping=pb.Stopping(max_new_tokens=new))
        await call.write(pb.Orders(number=1, placements=[sequence], prefill_slots=[0], prefill_tokens=[2]))
        while not (await call.read()).slots:
            pass
        print("driven", flush=True)
        while True:
            await call.read()

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


@contextmanager
def started(host: tuple[str, ...], *command: str | Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen((*host, *command), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
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
def test_a_shard_is_free_soon_after_the_host_of_its_router_vanished(load: str) -> None:
    shard = Path(sys.executable).with_name("text-generation-shard")
    flags = ("--engine=echo", "--echo-step-ms=5", f"--address={ADDRESS}", "--insecure")
    with (
        two_hosts(SHARD, ROUTER) as (shard_host, router_host),
        started(shard_host, shard, *flags),
        started(router_host, sys.executable, "-c", HOLDER, ADDRESS, load) as holder,
    ):
        wait_for(holder, "driven")
        with started(shard_host, sys.executable, "-c", WAITER, ADDRESS) as waiter:
            wait_for(waiter, "held")
            ip("-n", router_host[-1], "link", "set", "eth0", "down")
            vanished = time.monotonic()
            wait_for(waiter, "free")
            seconds = time.monotonic() - vanished
    print(f"{load}: free after {seconds:.1f} s")
    assert seconds <= FREE_AFTER_S
