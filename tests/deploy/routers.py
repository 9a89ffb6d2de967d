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
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
from servers import free_port

ROUTERS, SHARDS, STREAMS, TOKENS = 2, 4, 8, 400
BARS_S = {"kill": 2.0, "cut": 15.0}
PREFIX = f"tg{os.getpid() % 1000}"


@contextmanager
def process(*command: str, log: Path, env: Mapping[str, str] = {}) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output:
        environ = {**os.environ, **env}
        started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ)
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


SERVING = 'text_generation_shards{state="serving"}'


async def until(
    session: aiohttp.ClientSession, expected: dict[str, float], seconds: float, line: str = SERVING
) -> float:
    """Return the seconds until each router shows its value of a metric, by default the number of shards that it drives."""
    began = time.monotonic()
    while (found := {url: await metric(session, url, line) for url in expected}) != expected:
        assert time.monotonic() - began < seconds, found
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


def start_shards(
    stack: AsyncExitStack,
    folder: Path,
    count: int,
    env: Mapping[str, str] = {},
    host: str = "127.0.0.1",
) -> list[str]:
    """Start shards and return their addresses."""
    shards = [f"{host}:{free_port()}" for _ in range(count)]
    for number, address in enumerate(shards):
        flags = ("--engine=echo", "--echo-step-ms=10", "--insecure", f"--address={address}")
        log = folder / f"shard-{number}.log"
        stack.enter_context(process(command("text-generation-shard"), *flags, log=log, env=env))
    return shards


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
        shards = start_shards(stack, folder, SHARDS, host=shard_host)
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


async def ready(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health/ready") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def all_ready(session: aiohttp.ClientSession, urls: Mapping[int, str], ports: Iterable[int]) -> None:
    """Wait until each of these routers is ready."""
    began = time.monotonic()
    while not all([await ready(session, urls[port]) for port in ports]):
        assert time.monotonic() - began < 90, "a router does not become ready"
        await asyncio.sleep(0.1)


async def evict(session: aiohttp.ClientSession, model: str, folder: Path, shards: int, count: int) -> None:
    """Replace each router in turn, with requests of many seconds: the new one starts as the old one is told to stop."""
    async with AsyncExitStack() as stack:
        addresses = start_shards(stack, folder, shards)
        ports = [free_port() for _ in range(count + 1)]
        members = folder / "routers"

        def list_routers(names: list[int]) -> None:
            members.with_suffix(".new").write_text("".join(f"- 127.0.0.1:{port}\n" for port in names))
            members.with_suffix(".new").rename(members)

        def start(port: int) -> subprocess.Popen[bytes]:
            flags = ("--shards", ",".join(addresses), "--peers", f"file://{members}", "--port", str(port))
            return stack.enter_context(
                process(
                    command("text-generation-router"), "--model-path", model, *flags, log=folder / f"router-{port}.log"
                )
            )

        list_routers(ports[:count])
        routers = {port: start(port) for port in ports[:count]}
        urls = {port: f"http://127.0.0.1:{port}" for port in ports}
        await all_ready(session, urls, routers)
        unready, over = 0.0, False

        async def watch() -> None:
            """Add up the seconds in which no router is ready."""
            nonlocal unready
            before = time.monotonic()
            while not over:
                await asyncio.sleep(0.05)
                found = [await ready(session, urls[port]) for port in tuple(routers)]
                now = time.monotonic()
                unready += 0.0 if any(found) else now - before
                before = now

        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch())
            for port in tuple(routers):
                streams = [tasks.create_task(stream(session, urls[each])) for each in routers for _ in range(2)]
                await asyncio.sleep(1)
                spare = next(each for each in ports if each not in routers)
                old = routers[port]
                routers[spare] = start(spare)
                list_routers([*routers])
                old.terminate()
                assert await asyncio.to_thread(old.wait, 120) == 0
                del routers[port]
                list_routers([*routers])
                assert [await each for each in streams] == [TOKENS] * len(streams)
                await all_ready(session, urls, routers)
            over = True
            await watching
    assert unready == 0, f"{unready:.1f} s without a ready router"
    print(
        f"evict: {count} routers over {shards} shards replaced one by one, 0 s without a ready one, all streams whole"
    )


async def unable(session: aiohttp.ClientSession, model: str, folder: Path) -> None:
    """Start a router with another token beside one that serves: it must take no shard away."""
    async with AsyncExitStack() as stack:
        tokens = {"SHARD_TOKEN": "right"}
        addresses = start_shards(stack, folder, SHARDS, tokens)
        ports = [free_port(), free_port()]
        peers = ",".join(f"127.0.0.1:{port}" for port in ports)
        for port, token in zip(ports, ("right", "wrong"), strict=True):
            flags = ("--shards", ",".join(addresses), "--peers", peers, "--port", str(port), "--model-path", model)
            log = folder / f"router-{token}.log"
            stack.enter_context(process(command("text-generation-router"), *flags, log=log, env={"SHARD_TOKEN": token}))
            if token == "right":
                await until(session, {f"http://127.0.0.1:{port}": SHARDS}, 60)
        good, bad = (f"http://127.0.0.1:{port}" for port in ports)
        await until(session, {bad: 0.0}, 60, "text_generation_replicas_serving")
        least = SHARDS
        for _ in range(100):
            least = min(least, int(await metric(session, good, SERVING)))
            await asyncio.sleep(0.1)
        assert (least, await ready(session, bad)) == (SHARDS, False)
    print(f"unable: the router with the right token kept all {SHARDS} shards; the other one is found by its metrics")


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


async def prove(how: str, model: str, folder: Path) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120, sock_connect=2)) as session:
        if how == "unable":
            await unable(session, model, folder)
            return
        for count, shards in ((2, 2), (2, 3), (3, 4)):
            (part := folder / f"{count}-{shards}").mkdir()
            await evict(session, model, part, shards, count)


def main() -> None:
    how, model = sys.argv[1], sys.argv[2]
    if how == "cut" and (os.geteuid() or not shutil.which("ip")):
        print("cut: skipped: network namespaces need root, and the command ip")
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            if how in ("evict", "unable"):
                asyncio.run(prove(how, model, Path(folder)))
                return
            seconds = asyncio.run(measure(how, model, Path(folder)))
        except BaseException:
            for log in sorted(Path(folder).rglob("*.log")):
                print(f"== {log.name}\n{log.read_text()[-2000:]}")
            raise
    print(
        f"{how}: all {SHARDS} shards driven again after {seconds:.2f} s (bar {BARS_S[how]} s), {2 * STREAMS} streams whole"
    )
    assert seconds <= BARS_S[how]


if __name__ == "__main__":
    main()
