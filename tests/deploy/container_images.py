"""Podman with a storage and a base image of its own: nothing of the machine's containers is used or changed."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "image"
LOCKS = ROOT / "deploy" / "container"
BASE = "docker.io/library/debian:bookworm-slim"
"""The name that the Containerfile has for its base; a system made by mmdebstrap is its stand-in."""
TOOLS = ("mmdebstrap", "buildah", "podman", "runc", "curl")

CONFIGURATION = """\
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[containers]
default_ulimits = ["nofile={most}:{most}", "nproc={most}:{most}"]
"""
STORAGE = """\
[storage]
driver = "overlay"
graphroot = "{cache}/storage"
runroot = "{folder}/run"
"""


class Podman:
    """Runs shell commands with settings that work without systemd, unified cgroups and CAP_SYS_RESOURCE."""

    def __init__(self, folder: Path) -> None:
        """`folder` gets the settings, and is the working directory of the commands."""
        CACHE.mkdir(parents=True, exist_ok=True)
        most = min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        (folder / "containers.conf").write_text(CONFIGURATION.format(most=most), "utf-8")
        (folder / "storage.conf").write_text(STORAGE.format(cache=CACHE, folder=folder), "utf-8")
        self.folder = folder
        self._environ = os.environ | {
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
            "BUILDAH_ISOLATION": "chroot",
        }

    def __call__(self, command: str, *, cwd: Path | None = None, check: bool = True) -> str:
        """Run a command line and return its output."""
        done = subprocess.run(
            ["/bin/bash", "-c", command],
            cwd=cwd or self.folder,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert not check or done.returncode == 0, f"{command}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done.stdout.strip()

    def build(self, command: str, wheels: Path, cwd: Path = ROOT) -> None:
        """Run a `podman build` with packages from a folder instead of an index."""
        offline = f"--volume {wheels}:/wheels:ro --build-arg PIP_NO_INDEX=1 --build-arg PIP_FIND_LINKS=/wheels"
        self(command.replace("podman build ", f"podman build {offline} "), cwd=cwd)

    def inspect(self, name: str) -> Mapping[str, Any]:
        """Return the description of a container or an image."""
        (description,) = json.loads(self(f"podman inspect {name}"))
        return description


def until(holds: Callable[[], bool]) -> None:
    """Ask again until the answer is true; each question starts a process, so there is no need to sleep."""
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end


def require_tools() -> None:
    """Skip if this machine cannot build and run containers."""
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        pytest.skip(f"not installed: {' '.join(lacking)} (apt install {' '.join(lacking)})")
    if os.geteuid() != 0:
        pytest.skip("needs root")


def import_base(podman: Podman) -> None:
    """Make the base image from the packages of this machine's distribution."""
    file = CACHE / "base.tar"
    if not file.exists():
        suite = platform.freedesktop_os_release()["VERSION_CODENAME"]
        sources = [
            path for path in ("/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list") if Path(path).exists()
        ]
        new = file.with_name(
            "base.new.tar"
        )  # mmdebstrap makes a folder where a name does not end as that of an archive
        podman(f"mmdebstrap --variant=minbase {suite} {new} {sources[0] if sources else ''} && mv {new} {file}")
    if not podman(f"podman images --quiet {BASE}"):
        podman(f"podman import --quiet {file} {BASE}")


def download(locks: Sequence[str], *packages: str) -> Path:
    """Return a folder with the wheels of locked files, hashes checked, and of other packages, for the Python of the base."""
    found = re.search(r"\d+\.\d+", subprocess.check_output(["/usr/bin/python3", "--version"], text=True))
    assert found is not None
    folder = CACHE / "wheels"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
    ]
    pip += ["--python-version", found[0]]
    for file in locks:
        subprocess.run([*pip, "--require-hashes", "-r", str(LOCKS / file)], check=True)
    if packages:
        index = ["--index-url", os.environ["TORCH_INDEX"]] if "TORCH_INDEX" in os.environ else []
        subprocess.run([*pip, *index, *packages], check=True)
    return folder


def require_torch_for_cpus() -> str:
    """Return the requirement; skip where pip would download a build with gigabytes of CUDA libraries."""
    if "TORCH_INDEX" not in os.environ and not version("torch").endswith("+cpu"):
        pytest.skip("set TORCH_INDEX to an index with builds of torch for CPUs")
    return f"torch=={version('torch').partition('+')[0]}"
