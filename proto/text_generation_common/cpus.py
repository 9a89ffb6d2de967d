"""The number of CPU cores that this process may use."""

import math
import os
from collections.abc import Iterator
from pathlib import Path


def usable_cpus(root: Path = Path("/")) -> int:
    """Return the number of cores of this process by its affinity and the quotas of its cgroups, rounded up.

    `root` is the folder with `proc` and `sys`.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return math.ceil(min(cores, *map(_quota, cgroup_folders("cpu", root)), math.inf))


def cgroup_folders(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and of those above it that have the files of a controller."""
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in groups):
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        own = mount / path.lstrip("/")
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(mount))


def _quota(folder: Path) -> float:
    """Return the quota in the files of cgroup version 2 or 1; infinity without one."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        else:
            files = (folder / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
            quota, period = (file.read_text(encoding="ascii") for file in files)
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError):  # the quota may be the word max
        return math.inf
