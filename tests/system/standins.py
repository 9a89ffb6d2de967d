"""Small processes in the place of shards and routers, for tests of how the launcher handles processes.

Each writes to the journal what happens to it, one word a line.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from text_generation_launcher.plan import ChildSpec, ShardSpec

SHARD = """
import asyncio, signal, sys
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio
async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server, health = grpc.aio.server(), aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    await health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    server.add_insecure_port(ADDRESS)
    await server.start()
    say("shard-listens")
    await serve(health, stop)
    await server.stop(0)
    say("shard-stops")
async def serve(health, stop):
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    await stop.wait()
"""

ROUTER = """
import http.server, signal, sys, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
    def log_message(self, *args): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", PORT), Handler)
def stop(*_):
    say("router-stops")
    drain()
    threading.Thread(target=server.shutdown).start()
def drain(): pass
def main():
    signal.signal(signal.SIGTERM, stop)
    say("router-listens")
    server.serve_forever()
"""


class Journal:
    """What the stand-ins say, in order."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal"
        os.mkfifo(self.path)
        # For reading and writing: so it never ends, and nobody's write waits.
        self._file = os.fdopen(os.open(self.path, os.O_RDWR), "r")

    async def next(self) -> str:
        """The next word; waits for it."""
        return (await asyncio.to_thread(self._file.readline)).strip()

    def close(self) -> None:
        """Stop listening."""
        self._file.close()


def child(name: str, journal: Journal, script: str, *, stop_timeout: float = 20.0) -> ChildSpec:
    """A process that runs `script`, which can `say` things to the journal."""
    return ChildSpec(name, _argv(journal, script), dict(os.environ), (), stop_timeout)


def shard(journal: Journal, socket: Path, *, change: str = "", replica: int = 0) -> ShardSpec:
    """A shard that serves nothing but health; `change` is code that replaces a part of it. It is its whole replica."""
    address = f"unix://{socket}"
    script = f"ADDRESS = {address!r}\n{SHARD}\n{change}\nasyncio.run(main())"
    return ShardSpec(
        name=f"shard-{replica}",
        argv=_argv(journal, script),
        env=dict(os.environ),
        inherited_fds=(),
        stop_timeout=20.0,
        replica=replica,
        rank=0,
        address=address,
    )


def router(journal: Journal, port: int, *, change: str = "") -> ChildSpec:
    """A router that serves nothing but /health; `change` is code that replaces a part of it."""
    return child("router", journal, f"PORT = {port}\n{ROUTER}\n{change}\nmain()")


def _argv(journal: Journal, script: str) -> tuple[str, ...]:
    say = f"def say(word):\n    with open({str(journal.path)!r}, 'a') as file: file.write(word + '\\n')\n"
    return (sys.executable, "-c", say + script)
