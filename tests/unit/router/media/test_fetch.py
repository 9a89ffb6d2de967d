"""Images by URL: hosts, addresses, redirects, sizes and times. A server on this machine answers; its address is allowed for it."""

from __future__ import annotations

import asyncio
import ipaddress
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import cast

import pytest

from text_generation_router.admission_queue import PendingWork
from text_generation_router.config import RouterConfig
from text_generation_router.errors import Overloaded
from text_generation_router.media import fetch, reader
from text_generation_router.media.fetch import Fetcher, IpAddress, is_public
from text_generation_router.media.headers import BadImage
from text_generation_router.media.reader import ImageTokens
from text_generation_router.request import TenantId

MAX = 1000
ANSWERS = {
    "/image": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nimage",
    "/large": b"HTTP/1.1 200 OK\r\n\r\n",
    "/large?zip": b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n",
    "/slow": b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\na",
    "/none": b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n",
}
"""By path; others are redirected."""
LOOPBACK = ipaddress.ip_address("127.0.0.1")


@asynccontextmanager
async def fetcher(
    *hosts: str, is_allowed: Callable[[IpAddress], bool] = LOOPBACK.__eq__
) -> AsyncIterator[tuple[Fetcher, int]]:
    """A fetcher, and the port of a server: /image, and attacks."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        with suppress(ConnectionError):
            writer.write(
                ANSWERS.get(path, b"HTTP/1.1 302 F\r\nLocation: " + path.partition("?to=")[2].encode() + b"\r\n\r\n")
            )
            while path.startswith("/large"):  # endless
                writer.write(bytes(512))
                await writer.drain()
                await asyncio.sleep(0)
            if path == "/slow":
                await reader.read()
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, Fetcher([host.format(port) for host in hosts], MAX, is_allowed) as made:
        yield made, port


def hold_any(size: int) -> None:
    """Keep bytes without a limit."""


async def refusal(made: Fetcher, url: str) -> str:
    with pytest.raises(BadImage) as error:
        await made.fetch(url, hold_any)
    return str(error.value)


async def test_an_image_of_a_listed_host_is_fetched_also_over_redirects_to_one() -> None:
    async with fetcher("localhost:{}", "127.0.0.1:{}") as (made, port):
        assert await made.fetch(f"http://localhost:{port}/image", hold_any) == b"image"
        assert await made.fetch(f"http://LOCALHOST:{port}/to?to=http://127.0.0.1:{port}/image", hold_any) == b"image"
        assert await made.fetch(f"http://localhost:{port}/to?to=/image", hold_any) == b"image"
        assert made.allows(f"http://localhost:{port}/image")


async def test_other_hosts_ports_and_schemes_are_refused() -> None:
    async with fetcher("localhost:{}", "a.example") as (made, port):
        for url in (
            "http://localhost/image",
            f"http://127.0.0.1:{port}/image",
            f"http://a.example:{port}/",
            "http://sub.a.example/",
            "http://a.example.b/",
            "http://2130706433/",
            "http://[::1]/",
            f"http://localhost:{port}/to?to=http://169.254.169.254/latest/meta-data",
            f"http://localhost:{port}/to?to=//127.0.0.1:{port}/image",
        ):
            assert "does not fetch images from the host" in await refusal(made, url), url
        for url in (
            "file:///etc/passwd",
            "ftp://a.example/",
            f"gopher://localhost:{port}/",
            f"http://u:p@localhost:{port}/image",
            f"http://localhost:{port}@a.example/",
            "/image",
            "",
            f"http://localhost:{port}/to?to=file:///etc/passwd",
            "\0",
        ):
            assert "its URL is not supported" in await refusal(made, url), url
            assert not made.allows(url) or "to=" in url
        assert await refusal(made, "http://a.example/" + "%" * 5000) == "its URL has more than 4096 characters"
        for url in ("http://a.example:99999/", "http://[/"):
            assert "cannot be fetched" in await refusal(made, url), url


async def test_addresses_that_are_not_public_are_refused_however_the_host_is_named() -> None:
    async with fetcher("localhost:{}", "127.0.0.1:{}", is_allowed=is_public) as (made, port):
        for host in ("localhost", "127.0.0.1"):
            assert await refusal(made, f"http://{host}:{port}/image") == "it cannot be fetched from its URL", host


async def test_the_connection_goes_to_the_address_that_was_checked() -> None:
    """And the answer is not read by the event loop of the streams."""
    checked, threads = list[IpAddress](), set[threading.Thread]()

    def once(address: IpAddress) -> bool:
        checked.append(address)
        threads.add(threading.current_thread())
        return address == LOOPBACK

    async with fetcher("localhost:{}", is_allowed=once) as (made, port):
        assert await made.fetch(f"http://localhost:{port}/image", hold_any) == b"image"
    assert checked == [LOOPBACK]
    assert threading.main_thread() not in threads
    assert not any(thread.is_alive() for thread in threads)


async def test_large_slow_and_wrong_answers_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "FETCH_S", 0.3)
    async with fetcher("localhost:{}") as (made, port):
        url = f"http://localhost:{port}"
        assert await refusal(made, f"{url}/large") == f"its file has more than {MAX} bytes"
        assert await refusal(made, f"{url}/large?zip") == f"its file has more than {MAX} bytes"
        assert await refusal(made, f"{url}/slow") == "it did not arrive within 0.3 s"
        assert await refusal(made, f"{url}/none") == "the server of its URL answers 404"
        assert "leads to more than 3 others" in await refusal(
            made, f"{url}/to?to={url}/again?to=/again?to=/again?to=/again?to=/image"
        )
    async with Fetcher([f"localhost:{port}"], MAX, LOOPBACK.__eq__) as made:  # nothing listens there any more
        assert await refusal(made, f"{url}/image") == "it cannot be fetched from its URL"


async def test_bytes_count_as_they_arrive_and_until_the_image_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "Fetcher", partial(Fetcher, is_allowed=LOOPBACK.__eq__))
    async with fetcher() as (_, port):
        config = RouterConfig(model_path="model", allowed_media_domains=(f"localhost:{port}",))
        images = reader.ImageReader(cast("ImageTokens", None), 3, config, PendingWork())
        held = images._held
        async with images._fetcher, asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(images.read([f"http://localhost:{port}/slow"], TenantId("a")))
            async with asyncio.timeout(5):
                while held.in_use != 1:  # noqa: ASYNC110 - for bytes of another task
                    await asyncio.sleep(0)
            reading.cancel()
        assert held.in_use == 0
        held.hold(held.limit, TenantId("a"))
        async with images._fetcher:
            with pytest.raises(Overloaded):
                await images.read([f"http://localhost:{port}/large"], TenantId("a"))
        assert held.in_use == held.limit


@pytest.mark.parametrize(
    "address",
    [
        *("0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.2", "169.254.169.254", "172.16.0.1", "192.168.1.1"),
        *("192.0.2.1", "198.18.0.1", "224.0.0.1", "239.1.1.1", "255.255.255.255", "::", "::1", "fe80::1", "fd00::1"),
        *("ff02::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2001:0:1::1"),
    ],
)
def test_addresses_of_networks_of_its_own_are_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111"])
def test_other_addresses_are_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))
