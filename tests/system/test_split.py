"""Shards and a router under launchers of their own, as on different machines."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from ports import free_port
from stack import Stack, generate, running

pytestmark = [pytest.mark.system, pytest.mark.full]

TOKEN = {"SHARD_TOKEN": "hush"}


async def shards_of(session: aiohttp.ClientSession, url: str) -> dict[str, str]:
    async with session.get(f"{url}/info") as response:
        info: dict[str, Any] = await response.json()
    return {shard["address"]: shard["state"] for shard in info["shards"]}


async def until_shards(session: aiohttp.ClientSession, url: str, expected: dict[str, str]) -> None:
    async with asyncio.timeout(20):
        while await shards_of(session, url) != expected:  # noqa: ASYNC110 - it crosses processes
            await asyncio.sleep(0.05)


async def test_a_router_waits_for_its_shards_and_follows_those_that_a_file_names(
    echo_model: Path, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    members = tmp_path / "shards.yaml"
    good, odd, wrong_token = (free_port() for _ in range(3))
    address = {port: f"127.0.0.1:{port}" for port in (good, odd, wrong_token)}
    with closing(Stack(echo_model, "--parts=router", f"--shards=file://{members}", environ=TOKEN)) as router:
        router.wait_for("alive, waiting for a shard", "router")
        for path, status in (("/health/live", 200), ("/health", 503), ("/generate", 503)):
            async with session.get(f"{router.url}{path}") as response:
                assert response.status == status, path
        members.write_text(f"- {address[good]}\n")
        parts = ("--parts=shards", "--shard-tcp-port")
        with (
            running(echo_model, *parts, str(good), environ=TOKEN),
            running(echo_model, *parts, str(odd), "--echo-max-sequence-length=99", environ=TOKEN),
            running(echo_model, *parts, str(wrong_token), environ={"SHARD_TOKEN": "other"}),
        ):
            router.wait_for("ready")
            assert await generate(session, router.url)
            members.write_text("".join(f"- {each}\n" for each in address.values()))
            states = {address[good]: "serving", address[odd]: "refused", address[wrong_token]: "refused"}
            await until_shards(session, router.url, states)
            async with session.get(f"{router.url}/metrics") as response:
                assert 'text_generation_shards{state="refused"} 2.0' in await response.text()
            assert await generate(session, router.url)
        await until_shards(session, router.url, dict.fromkeys(states, "joining"))


def lines_of(manager: socket.socket, last: str) -> set[str]:
    """Return the lines that a process sends to its service manager, up to this one."""
    lines: set[str] = set()
    while last not in lines:
        lines |= set(manager.recv(4096).decode().split("\n"))
    return lines


async def test_a_router_whose_shards_another_one_drives_is_up_and_on_standby(
    echo_model: Path, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    address = f"127.0.0.1:{free_port()}"
    parts = ("--parts=router", f"--shards={address}")
    command = ("--model-path", echo_model, *parts[1:], "--hostname=127.0.0.1", f"--port={free_port()}")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
        running(echo_model, "--parts=shards", f"--shard-tcp-port={address.partition(':')[2]}", environ=TOKEN),
        running(echo_model, *parts, environ=TOKEN) as first,
    ):
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        environ = TOKEN | {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        await until_shards(session, first.url, {address: "serving"})
        with subprocess.Popen(  # noqa: ASYNC220 - it does not block
            (Path(sys.executable).with_name("text-generation-router"), *command), env=os.environ | environ
        ) as alone:
            assert "STATUS=standby: drives none of 1 shards" in await asyncio.to_thread(lines_of, manager, "READY=1")
            alone.terminate()
        with running(echo_model, *parts, environ=environ) as second:
            lines = await asyncio.to_thread(lines_of, manager, "READY=1")
            assert {"STATUS=the router waits for a shard", "STATUS=the router serves"} <= lines
            await until_shards(session, second.url, {address: "taken"})
            first.launcher.terminate()
            await until_shards(session, second.url, {address: "serving"})
