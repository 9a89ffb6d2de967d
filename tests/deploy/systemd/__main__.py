"""Run the systemd units in a container, print a table: python tests/deploy/systemd --model FOLDER.

The commands are those of docs/systemd.md, in its order. Commands that need a network run on the container's files from
outside; the container itself has none, so its cache of the hub is filled with the model before.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from checks import Checks
from container import Container, overlay, reason_to_skip, until

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "systemd.md"
NEEDS_NETWORK = re.compile(r"apt-get|pip install")
SOURCE = "usr/local/src/text-generation"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
OFFLINE = "[Service]\nEnvironment=HF_HUB_OFFLINE=1\n"
LONGEST_INSTALLATION_S = 600.0
BOOT_AND_WAIT = """
import signal
from container import Container, overlay
with overlay() as root:
    container = Container(root)
    container.boot()
    print(container.leader, flush=True)
    signal.pause()
"""


class Table:
    """The results of the checks."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def row(self, name: str, check: Callable[[], str]) -> None:
        """Run a check and print its row."""
        begin = time.monotonic()
        try:
            verdict, figure = "ok", check()
        except (AssertionError, subprocess.SubprocessError, OSError, ValueError, LookupError):
            verdict, figure = "FAILED", traceback.format_exc(limit=-2)
            self.failed.append(name)
        print(f"{verdict:7}{name:58}{figure}  ({time.monotonic() - begin:.0f} s)", flush=True)


def blocks(heading: str) -> list[str]:
    """Return the commands of the page below a heading."""
    text = PAGE.read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section is not None, heading
    return re.findall(r"^```sh\n(.*?)^```$", section[1], re.MULTILINE | re.DOTALL)


def follow(container: Container, heading: str) -> str:
    """Run the commands of a section; return the output of the last block."""
    output = ""
    for block in blocks(heading):
        output = container.run_with_network(block) if NEEDS_NETWORK.search(block) else container.run(block)
    return output


def prepare(container: Container, model: Path) -> None:
    """Put the repository and the model where the page expects them."""
    source = container.root / SOURCE
    source.mkdir(parents=True)
    listing = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "-co", "--exclude-standard"], check=True, capture_output=True
    )
    for name in filter(None, listing.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    cached = (
        container.root / "var/cache/text-generation/.cache/huggingface/hub" / f"models--{HUB_ID.replace('/', '--')}"
    )
    for folder in (cached / "snapshots" / "1", container.root / "srv/models" / model.name):
        shutil.copytree(model, folder, copy_function=shutil.copyfile)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("1")
    drop_in = container.root / "etc/systemd/system/text-generation@.service.d"
    drop_in.mkdir()
    (drop_in / "offline.conf").write_text(OFFLINE)


def killed_run_leaves_nothing() -> str:
    """Kill a run like this one; its container must end with it."""
    command = ["unshare", "--mount", sys.executable, "-c", BOOT_AND_WAIT]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            command, cwd=Path(__file__).parent, env=os.environ | {"TMPDIR": folder}, stdout=subprocess.PIPE, text=True
        ) as killed,
    ):
        assert killed.stdout is not None
        leader = Path("/proc", killed.stdout.readline().strip())
        killed.kill()
        seconds = until(lambda: not leader.exists(), 5.0, "end of the container")
        return f"its container ended after {seconds:.1f} s"


def run(container: Container, model: Path, table: Table) -> None:
    """Run all checks."""
    prepare(container, model)
    container.boot()
    checks = Checks(container)

    def install() -> str:
        begin = time.monotonic()
        follow(container, "Install")
        answer = follow(container, "Configure and start")
        seconds = time.monotonic() - begin
        assert "Paris" in answer, answer
        assert seconds < LONGEST_INSTALLATION_S, seconds
        return f"{seconds:.0f} s from zero to an answer of torch (bar 600)"

    def upgrade() -> str:
        follow(container, "Upgrade and roll back")
        running = checks.program("demo")
        assert "/releases/1/" in running, running
        return "new release installed beside, started, taken back"

    table.row("docs: install, configure, start", install)
    if table.failed:
        print(container.run("journalctl --no-pager -n 60", check=False))
        return
    table.row("units: verify clean, exposure at most 2.0", checks.units_are_clean)
    table.row("torch and the cache of the hub under the filter", checks.torch_serves)
    table.row(
        "docs: change settings and keys, reload",
        lambda: checks.keys_change(lambda: follow(container, "Change settings and keys")),
    )
    table.row("docs: upgrade, roll back", upgrade)
    table.row(
        "docs: router and shards apart",
        lambda: checks.parts_serve(lambda: follow(container, "Router and shards apart")),
    )
    table.row(
        "docs: router, shards on different machines, mutual TLS",
        lambda: checks.parts_use_tls(lambda: follow(container, "Router and shards on different machines")),
    )
    table.row("router: SIGSTOP; shard, its launcher: kill -9; code 76", checks.parts_return)
    checks.use_echo()
    table.row("start returns when /health answers 200", checks.start_is_ready)
    table.row("key in no argv, environment; 401 without", checks.key_is_hidden)
    table.row("grammar, template under the filter; workers confined", checks.workers_are_confined)
    table.row("stop in an answer of 60 tokens", checks.stop_drains)
    table.row("kill -9 of the launcher", checks.survives_kill)
    table.row("SIGSTOP of the launcher, watchdog", checks.watchdog_restarts)
    table.row("exit code 75 is restarted", checks.router_that_cannot_live_restarts)
    table.row("exit code 2 is not restarted", checks.usage_error_stays)
    table.row("exit code 76 is not restarted", checks.hopeless_stays)
    table.row("journalctl -p err shows errors alone", checks.errors_have_their_priority)
    table.row("reboot: the enabled unit serves again", checks.survives_reboot)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    options = parser.parse_args()
    if reason := reason_to_skip():
        print(f"test-systemd: skipped: {reason}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    table = Table()
    table.row("a run that is killed", killed_run_leaves_nothing)
    with overlay() as root:
        container = Container(root)
        try:
            run(container, options.model.absolute(), table)
        finally:
            container.close()
    print(f"test-systemd: {len(table.failed)} failed" if table.failed else "test-systemd: all passed")
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main())
