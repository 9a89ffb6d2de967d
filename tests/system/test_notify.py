"""Messages of the whole server to a service manager. The manager itself is tested by `make test-systemd`."""

from __future__ import annotations

import signal
import socket
import struct
import time
from pathlib import Path

import aiohttp
import pytest
from stack import running

pytestmark = pytest.mark.system


async def test_the_launcher_alone_reports_readiness_progress_and_state(
    echo_model: Path, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        manager.settimeout(60)
        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "2000000"}
        with running(echo_model, environ=environ) as stack:

            def until(wanted: str) -> list[str]:
                """Return the lines up to the message with this one."""
                lines: list[str] = []
                end = time.monotonic() + 60
                while wanted not in lines:
                    assert time.monotonic() < end, lines
                    text, control, _, _ = manager.recvmsg(4096, 64)
                    assert struct.unpack_from("i", control[0][2])[0] == stack.launcher.pid
                    lines += text.decode().split("\n")
                return lines

            before = until("READY=1")
            assert next(line for line in before if "STATUS" in line) == f"STATUS=starting {echo_model}"
            async with session.get(f"{stack.url}/health") as response:
                assert response.status == 200
            assert "STATUS=serving with 1 of 1 replicas" in before
            (shard,) = (child for child in stack.children() if "text_generation_shard" in child.cmdline())
            shard.kill()
            until("STATUS=serving with 0 of 1 replicas")
            until("STATUS=serving with 1 of 1 replicas")
            until("WATCHDOG=1")
            stack.launcher.send_signal(signal.SIGTERM)
            until("STOPPING=1")
            assert stack.wait() == 0
