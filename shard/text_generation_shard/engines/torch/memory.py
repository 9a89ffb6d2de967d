"""Memory of the machine and peak memory of this process, for the CPU."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files with the memory limit of a container, by cgroup version 2 and 1."""


LARGEST_KEPT = 31 << 20
"""Just below the size (32 MiB) up to which glibc raises its threshold for keeping freed blocks."""


def keep_freed_memory() -> None:
    """Make the C library keep large freed blocks for the next step instead of returning them to the system.

    glibc raises its thresholds to the size of freed blocks (mallopt(3), M_MMAP_THRESHOLD). Without this, a step of 48
    sequences returned 18 MiB each time and spent a tenth of its time on page faults.
    """
    torch.empty(LARGEST_KEPT, dtype=torch.uint8)


def total_memory() -> int:
    """Return the bytes of the machine, or of the container if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (path.read_text(encoding="ascii").strip() for path in CGROUP_LIMITS if path.is_file())
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])


def reset_peak() -> None:
    """Restart the measurement of peak memory."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        # The peak then includes loading, which errs on the safe side.
        return


def peak_memory() -> int:
    """Return the peak resident memory of this process since `reset_peak`, in bytes."""
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
