from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from text_generation_common.log_writer import ERASE_LINE, LogWriter
from text_generation_common.progress import WorkProgress, finished_work

LAUNCHER = """
import asyncio, os, sys
from text_generation_launcher.child import run_to_end
from text_generation_launcher.plan import ChildSpec
from text_generation_launcher.shutdown import GracefulShutdown
from text_generation_common.logs import configure_logging, drain_logs
from text_generation_common.settings import ChildConfig

config = ChildConfig.of(json_output="--json" in sys.argv)
configure_logging(config, "launcher")
spec = ChildSpec("shard-0", (sys.executable, "-c", sys.argv[1]), dict(os.environ), (), stop_timeout=5.0, config=config)
asyncio.run(run_to_end(spec, GracefulShutdown().grace_period))
drain_logs()
"""
SHARD = """
import os

from text_generation_common import progress
from text_generation_common.logs import configure_logging, drain_logs
from text_generation_common.settings import ChildConfig

configure_logging(ChildConfig.of(), "shard-0")
now = 0.0
work = progress.WorkProgress("loading weights", 4 << 30, in_bytes=True, clock=lambda: now)
now = 2.0
work.add(1 << 30)
progress.log.info("a line of the log")
open(os.environ["GO"]).read()
work.end()
drain_logs()
"""


def test_progress_is_logged_every_five_seconds_with_an_estimate() -> None:
    finished_work.clear()  # of other tests in this process
    now = 100.0
    progress = WorkProgress("loading weights", 4 << 30, in_bytes=True, clock=lambda: now)
    with capture_logs() as logs:
        for seconds in (4.9, 0.2, 4.0, 1.0):
            now += seconds
            progress.add(1 << 30)
        progress.end()
    fields = {"gib": 2.0, "of_gib": 4.0, "percent": 50, "seconds_left": 5}
    assert logs == [{"event": "loading weights", "log_level": "info", **fields}]
    assert round(progress.seconds, 1) == 10.1
    assert round(finished_work.pop("loading weights"), 1) == 10.1


def test_a_status_stays_below_the_lines_of_the_log() -> None:
    read_end, write_end = os.pipe()
    writer = LogWriter(write_end, lambda lines: b"")
    writer.show_status("half")
    assert os.read(read_end, 100) == ERASE_LINE + b"half"
    writer.write(b"line\n")
    received = b""
    while not received.endswith(b"half"):
        received += os.read(read_end, 100)
    assert received == ERASE_LINE + b"line\n" + ERASE_LINE + b"half"
    writer.show_status("")
    assert os.read(read_end, 100) == ERASE_LINE


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_the_progress_of_a_child_is_one_line_of_the_terminal(arguments: tuple[str, ...], tmp_path: Path) -> None:
    shown = ERASE_LINE + b"shard-0: loading weights 25 % (1.0 of 4.0 GiB, 6 s left)"
    os.mkfifo(go := tmp_path / "go")
    ours, terminal = pty.openpty()
    environ = {**os.environ, "COLUMNS": "120", "GO": str(go)}
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, SHARD, *arguments], stderr=terminal, env=environ):
        os.close(terminal)
        output = b""
        while b"a line" not in output or not (arguments or output.endswith(shown)):
            output += os.read(ours, 4096)
        go.write_bytes(b"on")
        try:
            while received := os.read(ours, 4096):
                output += received
        except OSError:  # the other end of the terminal is closed
            os.close(ours)
    assert b"a line of the log" in output
    assert b"\x1e" not in output
    assert (ERASE_LINE in output) is (not arguments), "JSON has no terminal"
    assert output.endswith(b"\n" if arguments else ERASE_LINE)
