"""Several routers over shared shards, as processes: how long until all shards are driven again when a router is gone.

    python tests/deploy/routers.py kill      the process is killed                          bar: 2 s
    python tests/deploy/routers.py cut       its host vanishes (network namespaces, root)   bar: 15 s
    python tests/deploy/routers.py evict     each router in turn is replaced, as `kubectl drain` does: one is ready at every moment
    python tests/deploy/routers.py unable    a router with another token gets no shard, and is found at /metrics

Prints the figure, and fails if it is over the bar, or if a client of the other routers saw an error.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import aiohttp
from servers import Answer, Process, free_port, shard, started, stream, until_open, write_tokenizer

ROUTERS, SHARDS, STREAMS, TOKENS = 2, 4, 8, 400
BARS_S = {"kill": 2.0, "cut": 15.0}
PREFIX = f"tg{os.getpid() % 1000}"
SERVING = 'text_generation_shards{state="serving"}'


def ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True)


@contextmanager
def network(count: int) -> Iterator[list[str]]:
    """A bridge with `count` hosts, each a network namespace; yields their addresses. This process reaches all."""
    bridge = f"{PREFIX}br"
    addresses = []
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("addr", "add", "10.213.0.254/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for number in range(count):
            space, outer, inner = f"{PREFIX}n{number}", f"{PREFIX}o{number}", f"{PREFIX}i{number}"
            ip("netns", "add", space)
            ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", space)
            ip("link", "set", outer, "master", bridge, "up")
            ip("-n", space, "addr", "add", f"10.213.0.{number + 1}/24", "dev", inner)
            ip("-n", space, "link", "set", inner, "up")
            ip("-n", space, "link", "set", "lo", "up")
            addresses.append(f"10.213.0.{number + 1}")
        yield addresses
    finally:
        for number in range(count):
            subprocess.run(("ip", "link", "del", f"{PREFIX}o{number}"), check=False, capture_output=True)
            subprocess.run(("ip", "netns", "del", f"{PREFIX}n{number}"), check=False, capture_output=True)
        subprocess.run(("ip", "link", "del", bridge), check=False, capture_output=True)


class Deployment:
    """Shards of the echo engine and routers, which end with the stack."""

    def __init__(self, stack: AsyncExitStack, session: aiohttp.ClientSession, folder: Path) -> None:
        self._stack = stack
        self.session = session
        self._folder = folder
        self._shards: list[str] = []

    async def start_shards(self, count: int, host: str = "127.0.0.1", token: str = "") -> None:
        self._shards = [f"{host}:{free_port()}" for _ in range(count)]
        for address in self._shards:
            flags = ("--echo-step-ms=10", "--insecure")
            await self._stack.enter_async_context(shard(address, flags, {"SHARD_TOKEN": token}))

    async def start_router(self, address: str, peers: str, token: str = "", within: tuple[str, ...] = ()) -> Process:
        host, _, port = address.partition(":")
        flags = ("--shards", ",".join(self._shards), "--peers", peers, "--hostname", host, "--port", port)
        router = started(
            *("text_generation_router", "--model-path", str(self._folder), "--disable-grammar-support", *flags),
            environ={"SHARD_TOKEN": token},
            within=within,
        )
        return await self._stack.enter_async_context(router)

    async def is_ready(self, address: str) -> bool:
        try:
            async with self.session.get(f"http://{address}/health/ready") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def metric(self, address: str, line: str) -> float:
        try:
            async with self.session.get(f"http://{address}/metrics") as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError):
            return -1.0
        return next((float(each.rpartition(" ")[2]) for each in text.splitlines() if each.startswith(line + " ")), -1.0)

    async def until(self, expected: dict[str, float], line: str = SERVING) -> float:
        """Return the seconds until each router shows its value of a metric, by default the number of shards that it drives."""
        began = time.monotonic()
        while (found := {address: await self.metric(address, line) for address in expected}) != expected:
            assert time.monotonic() - began < 60, found
            await asyncio.sleep(0.02)
        return time.monotonic() - began

    def streams(self, tasks: asyncio.TaskGroup, address: str, count: int) -> list[asyncio.Task[Answer]]:
        url = f"http://{address}"
        return [tasks.create_task(stream(self.session, url, f"client {n} says ", TOKENS)) for n in range(count)]


def check(streams: list[asyncio.Task[Answer]]) -> None:
    wrong = [answer for task in streams if not (answer := task.result()).is_right(TOKENS)]
    assert not wrong, wrong[0]


async def evict(servers: Deployment, folder: Path, shards: int, count: int) -> None:
    """Replace each router in turn, with requests of many seconds: the new one starts as the old one is told to stop."""
    await servers.start_shards(shards)
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(count + 1)]
    members = folder / "routers"
    routers: dict[str, Process] = {}

    def list_routers(names: list[str]) -> None:
        members.with_suffix(".new").write_text("".join(f"- {name}\n" for name in names))
        members.with_suffix(".new").rename(members)

    async def start(address: str) -> None:
        routers[address] = await servers.start_router(address, f"file://{members}")

    list_routers(addresses[:count])
    for address in addresses[:count]:
        await start(address)
    unready, over = 0.0, False

    async def watch() -> None:
        """Add up the seconds in which no router is ready."""
        nonlocal unready
        before = time.monotonic()
        while not over:
            await asyncio.sleep(0.05)
            found = [await servers.is_ready(address) for address in tuple(routers)]
            now = time.monotonic()
            unready += 0.0 if any(found) else now - before
            before = now

    async def all_ready() -> None:
        for address in routers:
            await until_open(servers.session, f"http://{address}", "/health/ready")

    await all_ready()
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch())
        for address in tuple(routers):
            running = [task for each in routers for task in servers.streams(tasks, each, 2)]
            await asyncio.sleep(1)
            old = routers[address]
            await start(next(each for each in addresses if each not in routers))
            list_routers([*routers])
            old.signal(signal.SIGTERM)
            assert await old.ended() == 0
            del routers[address]
            list_routers([*routers])
            await asyncio.wait(running)
            check(running)
            await all_ready()
        over = True
        await watching
    assert unready == 0, f"{unready:.1f} s without a ready router"
    print(
        f"evict: {count} routers over {shards} shards replaced one by one, 0 s without a ready one, all streams whole"
    )


async def unable(servers: Deployment) -> None:
    """Start a router with another token beside one that serves: it must take no shard away."""
    await servers.start_shards(SHARDS, token="right")
    good, bad = (f"127.0.0.1:{free_port()}" for _ in range(2))
    await servers.start_router(good, f"{good},{bad}", "right")
    await servers.until({good: SHARDS})
    await servers.start_router(bad, f"{good},{bad}", "wrong")
    await servers.until({bad: 0.0}, "text_generation_replicas_serving")
    least = SHARDS
    for _ in range(100):
        least = min(least, int(await servers.metric(good, SERVING)))
        await asyncio.sleep(0.1)
    assert (least, await servers.is_ready(bad)) == (SHARDS, False)
    print(f"unable: the router with the right token kept all {SHARDS} shards; the other one is found by its metrics")


async def lose(servers: Deployment, how: str, hosts: list[str]) -> None:
    """Lose one of two routers, or its host; the other one takes its shards over."""
    await servers.start_shards(SHARDS, "10.213.0.254" if how == "cut" else "127.0.0.1")
    addresses = [f"{host}:{free_port()}" for host in hosts]
    routers = []
    for number, address in enumerate(addresses):
        within = ("ip", "netns", "exec", f"{PREFIX}n{number}") if how == "cut" else ()
        routers.append(await servers.start_router(address, ",".join(addresses), within=within))
    await servers.until(dict.fromkeys(addresses, SHARDS / ROUTERS))
    async with asyncio.TaskGroup() as tasks:
        streams = servers.streams(tasks, addresses[0], STREAMS)
        await asyncio.sleep(1)
        if how == "cut":
            ip("link", "set", f"{PREFIX}o1", "down")
        else:
            routers[1].signal(signal.SIGKILL)
        seconds = await servers.until({addresses[0]: SHARDS})
        streams += servers.streams(tasks, addresses[0], STREAMS)
    check(streams)
    print(
        f"{how}: all {SHARDS} shards driven again after {seconds:.2f} s (bar {BARS_S[how]} s), {2 * STREAMS} streams whole"
    )
    assert seconds <= BARS_S[how]


async def main(how: str) -> None:
    for count, shards in ((2, 2), (2, 3), (3, 4)) if how == "evict" else ((ROUTERS, SHARDS),):
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            write_tokenizer(folder)
            hosts = stack.enter_context(network(ROUTERS)) if how == "cut" else ["127.0.0.1"] * ROUTERS
            timeout = aiohttp.ClientTimeout(total=120, sock_connect=2)
            session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
            servers = Deployment(stack, session, folder)
            if how == "evict":
                await evict(servers, folder, shards, count)
            elif how == "unable":
                await unable(servers)
            else:
                await lose(servers, how, hosts)


if __name__ == "__main__":
    if sys.argv[1] == "cut" and (os.geteuid() or not shutil.which("ip")):
        print("cut: skipped: network namespaces need root, and the command ip")
    else:
        asyncio.run(main(sys.argv[1]))
