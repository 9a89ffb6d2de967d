"""A container with a real systemd: systemd-nspawn over an overlay of this machine's root, which stays as it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

SIZE = "8g"
"""Most memory for the files that a run writes: two virtual environments."""
BOOT_S = 60.0
ENVIRON = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
FOREIGN_UNITS = ("etc/systemd/system/*.wants/*", "etc/systemd/system/text-generation*", "etc/rc?.d/*")
"""Services of this machine, which are no part of the test."""

ENDS_WITH_ITS_PARENT = ("setpriv", "--pdeathsig=KILL", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Starts a command whose processes all end with this process, also if it is killed: systemd-nspawn alone would leave them."""


def reason_to_skip() -> str:
    """Return the reason why this machine cannot run containers; "" if it can."""
    if os.geteuid() != 0:
        return "root is needed"
    for program in ("systemd-nspawn", "nsenter", "setpriv", "systemd-analyze"):
        if shutil.which(program) is None:
            return f"{program} is missing: apt-get install systemd systemd-container"
    if not Path("/usr/bin/python3").exists():
        return "/usr/bin/python3 is missing"
    try:
        with overlay():
            return ""
    except subprocess.CalledProcessError as error:
        return f"no overlay on a tmpfs can be mounted: {error.stderr.strip()}"


def until(condition: Callable[[], bool], timeout: float, what: str) -> float:
    """Wait until `condition` holds; return the seconds. Raises TimeoutError."""
    begin = time.monotonic()
    while not condition():
        if time.monotonic() - begin > timeout:
            raise TimeoutError(f"{what}: not within {timeout:g} s")
        time.sleep(0.05)
    return time.monotonic() - begin


@contextmanager
def overlay() -> Iterator[Path]:
    """Yield the root of a copy of this machine's files."""
    base = Path(tempfile.mkdtemp(prefix="systemd-"))
    mounted: list[Path] = []
    try:
        _mount("-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", base)
        mounted.append(base)
        root, upper, work = base / "root", base / "upper", base / "work"
        for folder in (root, upper, work):
            folder.mkdir()
        _mount("-t", "overlay", "-o", f"lowerdir=/,upperdir={upper},workdir={work}", "overlay", root)
        mounted.append(root)
        yield root
    finally:
        for path in reversed(mounted):
            subprocess.run(["umount", "--lazy", path], check=False)
        base.rmdir()


def _mount(*args: str | Path) -> None:
    subprocess.run(["mount", *args], check=True, capture_output=True, text=True)


class Container:
    """A container that can be booted and run commands."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._nspawn: subprocess.Popen[bytes] | None = None
        self.leader = 0
        """Its first process, as this machine numbers it."""
        for pattern in FOREIGN_UNITS:
            for path in root.glob(pattern):
                path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)

    def boot(self) -> float:
        """Boot; return the seconds."""
        command = ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--private-network", "--console=pipe"]
        self._nspawn = subprocess.Popen(
            [*ENDS_WITH_ITS_PARENT, *command, f"--directory={self.root}", "--boot"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        unshare = self._nspawn.pid

        def booted() -> bool:
            if not (leader := _only_child(_only_child(unshare))):
                return False
            self.leader = leader
            state = self.run("systemctl is-system-running", check=False).strip()
            return state in ("running", "degraded")

        return until(booted, BOOT_S, "boot")

    def reboot(self) -> None:
        """Reboot, as `systemctl reboot` does, and boot again."""
        assert self._nspawn is not None
        self.run("systemctl reboot", check=False)
        self._nspawn.wait(180)
        self.boot()

    def close(self) -> None:
        """Power off at once."""
        if self._nspawn is not None:
            self._nspawn.kill()
            self._nspawn.wait()

    def run(self, script: str, *, check: bool = True, timeout: float = 300) -> str:
        """Run a script in the container; return what it prints. Raises AssertionError if it fails."""
        inside = ["nsenter", "--target", str(self.leader), "--all", "env", "--chdir=/root"]
        return _run([*inside, "bash", "-euo", "pipefail", "-c", script], ENVIRON, timeout, check=check)

    def start(self, script: str) -> subprocess.Popen[str]:
        """Start a script in the container."""
        inside = ["nsenter", "--target", str(self.leader), "--all", "env", "--chdir=/root"]
        return subprocess.Popen([*inside, "bash", "-c", script], env=ENVIRON, stdout=subprocess.PIPE, text=True)

    def run_with_network(self, script: str, timeout: float = 900) -> str:
        """Run a script on the container's files with the network and pip's settings of this machine."""
        settings = {
            name: value for name, value in os.environ.items() if name.startswith("PIP_") or "proxy" in name.lower()
        }
        settings |= {"PIP_NO_CACHE_DIR": "1", "DEBIAN_FRONTEND": "noninteractive"}
        # A file system may have no device files, or be mounted so that they do not work.
        enter = 'mount --bind /dev "$0/dev" && exec chroot "$0" bash -euo pipefail -c "$1"'
        command = ["unshare", "--mount", "sh", "-c", enter, str(self.root), script]
        return _run(command, ENVIRON | settings, timeout)


def _only_child(pid: int) -> int:
    """Return the process that `pid` started; 0 if there is none."""
    try:
        return int((Path(f"/proc/{pid}/task/{pid}/children").read_text().split() or ["0"])[0])
    except OSError:
        return 0


def _run(command: list[str], environ: Mapping[str, str], timeout: float, *, check: bool = True) -> str:
    done = subprocess.run(
        command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0 or not check, f"exit code {done.returncode}: {command[-1]}\n{done.stdout}{done.stderr}"
    return done.stdout
