"""Several routers over shared shards, as processes: how long until all shards are driven again when a router is gone.

    python tests/deploy/routers.py kill      the process is killed                          bar: 2 s
    python tests/deploy/routers.py cut       its host vanishes (network namespaces, root)   bar: 15 s

Prints the figure, and fails if it is over the bar, or if a client of the other router saw an error.
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
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
from servers import free_port

ROUTERS, SHARDS, STREAMS, TOKENS = 2, 4, 8, 400
BARS_S = {"kill": 2.0, "cut": 15.0}
PREFIX = f"tg{os.getpid() % 1000}"


@contextmanager
def process(*command: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output:
        started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield started
    finally:
        if started.poll() is None:
            started.kill()
        started.wait()


def command(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


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


async def metric(session: aiohttp.ClientSession, url: str, line: str) -> float:
    try:
        async with session.get(f"{url}/metrics") as response:
            text = await response.text()
    except (aiohttp.ClientError, TimeoutError):
        return -1.0
    return next((float(each.rpartition(" ")[2]) for each in text.splitlines() if each.startswith(line + " ")), -1.0)


async def serving(session: aiohttp.ClientSession, url: str) -> float:
    return await metric(session, url, 'text_generation_shards{state="serving"}')


async def until(session: aiohttp.ClientSession, expected: dict[str, float], seconds: float) -> float:
    """Return the seconds until each router drives so many shards."""
    began = time.monotonic()
    while {url: await serving(session, url) for url in expected} != expected:
        assert time.monotonic() - began < seconds, {url: await serving(session, url) for url in expected}
        await asyncio.sleep(0.02)
    return time.monotonic() - began


async def stream(session: aiohttp.ClientSession, url: str) -> int:
    """Return the tokens of a stream that ended well."""
    body = {"inputs": "one two three", "parameters": {"max_new_tokens": TOKENS}}
    tokens = 0
    async with session.post(f"{url}/generate_stream", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            assert b'"error"' not in line, line
            tokens += line.startswith(b"data:")
    return tokens


@asynccontextmanager
async def deployment(
    how: str, model: str, folder: Path
) -> AsyncIterator[tuple[list[str], list[subprocess.Popen[bytes]]]]:
    """Routers and shards; yields the routers' URLs and processes."""
    async with AsyncExitStack() as stack:
        if how == "cut":
            hosts = stack.enter_context(network(ROUTERS))
            shard_host, port = "10.213.0.254", free_port()
            within = [("ip", "netns", "exec", f"{PREFIX}n{number}") for number in range(ROUTERS)]
            ports = [port] * ROUTERS
        else:
            hosts, shard_host, within = ["127.0.0.1"] * ROUTERS, "127.0.0.1", [()] * ROUTERS  # type: ignore[list-item]
            ports = [free_port() for _ in range(ROUTERS)]
        shards = [f"{shard_host}:{free_port()}" for _ in range(SHARDS)]
        for number, address in enumerate(shards):
            flags = ("--engine=echo", "--echo-step-ms=10", "--insecure", f"--address={address}")
            stack.enter_context(process(command("text-generation-shard"), *flags, log=folder / f"shard-{number}.log"))
        peers = ",".join(f"{host}:{port}" for host, port in zip(hosts, ports, strict=True))
        routers = []
        for number, (host, port) in enumerate(zip(hosts, ports, strict=True)):
            flags = (
                *("--hostname", host, "--port", str(port), "--model-path", model, "--shards", ",".join(shards)),
                *("--peers", peers),
            )
            log = folder / f"router-{number}.log"
            routers.append(
                stack.enter_context(process(*within[number], command("text-generation-router"), *flags, log=log))
            )
        yield [f"http://{host}:{port}" for host, port in zip(hosts, ports, strict=True)], routers


async def measure(how: str, model: str, folder: Path) -> float:
    async with (
        deployment(how, model, folder) as (urls, routers),
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120, sock_connect=2)) as session,
    ):
        await until(session, dict.fromkeys(urls, SHARDS / ROUTERS), 60)
        async with asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(stream(session, urls[0])) for _ in range(STREAMS)]
            await asyncio.sleep(1)
            if how == "cut":
                ip("link", "set", f"{PREFIX}o1", "down")
            else:
                routers[1].send_signal(signal.SIGKILL)
            seconds = await until(session, {urls[0]: SHARDS}, 60)
            streams += [tasks.create_task(stream(session, urls[0])) for _ in range(STREAMS)]
        assert [task.result() for task in streams] == [TOKENS] * 2 * STREAMS
    return seconds


def main() -> None:
    how, model = sys.argv[1], sys.argv[2]
    if how == "cut" and (os.geteuid() or not shutil.which("ip")):
        print("cut: skipped: network namespaces need root, and the command ip")
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            seconds = asyncio.run(measure(how, model, Path(folder)))
        except BaseException:
            for log in sorted(Path(folder).iterdir()):
                print(f"== {log.name}\n{log.read_text()[-2000:]}")
            raise
    print(
        f"{how}: all {SHARDS} shards driven again after {seconds:.2f} s (bar {BARS_S[how]} s), {2 * STREAMS} streams whole"
    )
    assert seconds <= BARS_S[how]


if __name__ == "__main__":
    main()
