"""Restart two servers behind Envoy in turn, under load: no request may fail.

Usage: python rolling_servers.py --envoy FILE [--restarts 2] [--shutdown-delay 3]. Envoy asks /health/ready each second, and
does not repeat requests.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import signal
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
from servers import Process, free_port, started, stream, until_open, write_tokenizer

CLIENTS, NEW_TOKENS = 6, 40
LEAST_REQUESTS = 300


def envoy_config(port: int, servers: list[int]) -> dict[str, object]:
    """Envoy between clients and servers: round robin, health checks, no retries."""
    check = {
        "timeout": "1s",
        "interval": "1s",
        "no_traffic_interval": "1s",  # the default is 60 s: a server that starts would be unknown for so long
        "unhealthy_threshold": 1,
        "healthy_threshold": 1,
        "http_health_check": {"path": "/health/ready"},
    }
    endpoints = [{"endpoint": {"address": _address(server)}} for server in servers]
    cluster = {
        "name": "servers",
        "type": "STATIC",
        "connect_timeout": "1s",
        "health_checks": [check],
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "load_assignment": {"cluster_name": "servers", "endpoints": [{"lb_endpoints": endpoints}]},
    }
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "http",
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
            }
        ],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "servers", "timeout": "0s"}}],
                }
            ]
        },
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    listener = {"address": _address(port), "filter_chains": [{"filters": filters}]}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


def _address(port: int) -> dict[str, object]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


async def main() -> int:
    """Run the restarts; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envoy", required=True)
    parser.add_argument("--restarts", type=int, default=2, help="of each server")
    parser.add_argument("--shutdown-delay", type=float, default=3.0)
    options = parser.parse_args()
    outcomes: collections.Counter[str] = collections.Counter()
    over = asyncio.Event()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="t-")))
        write_tokenizer(folder)
        ports = [free_port() for _ in range(3)]

        async def server(port: int) -> Process:
            flags = (f"--model-id={folder}", "--engine=echo", "--echo-step-ms=5", "--disable-grammar-support",
                     "--hostname=127.0.0.1", f"--port={port}", f"--shutdown-delay={options.shutdown_delay}")  # fmt: skip
            process = await stack.enter_async_context(started("text_generation_launcher", *flags))
            await process.event("ready")
            return process

        servers = [await server(port) for port in ports[1:]]
        (folder / "envoy.json").write_text(json.dumps(envoy_config(ports[0], ports[1:])))
        command = (
            options.envoy,
            "-c",
            folder / "envoy.json",
            "--concurrency",
            "1",
            "--use-dynamic-base-id",
            "-l",
            "error",
        )
        envoy = await asyncio.create_subprocess_exec(*command)
        stack.push_async_callback(_end, envoy)
        url = f"http://127.0.0.1:{ports[0]}"
        session = await stack.enter_async_context(aiohttp.ClientSession())
        await until_open(session, url)

        async def client(number: int) -> None:
            while not over.is_set():
                answer = await stream(session, url, f"client {number} ", NEW_TOKENS)
                right = answer.is_right(NEW_TOKENS)
                outcomes["right" if right else f"failed: {answer.status} {answer.error}"] += 1

        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for number in range(CLIENTS):
                tasks.create_task(client(number))
            for restart in range(2 * options.restarts):
                await asyncio.sleep(2)
                number = restart % 2
                servers[number].signal(signal.SIGTERM)
                assert await servers[number].ended() == 0
                servers[number] = await server(ports[1 + number])
                await asyncio.sleep(2)  # two health checks
            while outcomes.total() < LEAST_REQUESTS:  # noqa: ASYNC110 - a count has no event
                await asyncio.sleep(0.1)
            over.set()
    failed = outcomes.total() - outcomes["right"]
    print(
        f"Envoy, delay {options.shutdown_delay:g} s, {2 * options.restarts} restarts in {time.monotonic() - began:.0f} s: "
        f"{failed} of {outcomes.total()} requests failed"
    )
    for outcome, count in outcomes.items():
        if outcome != "right":
            print(f"{count} × {outcome}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
