"""How much memory the machine has, and the most this process has used of it: for the CPU."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where a container's limit is written, by cgroup version 2 and 1."""


LARGEST_KEPT = 31 << 20
"""Just under the size (32 MiB) up to which glibc learns to keep freed blocks."""


def keep_freed_memory() -> None:
    """Have the C library keep large freed blocks for the next step instead of giving them back to the system.

    glibc raises its thresholds to what it has seen freed (mallopt(3), M_MMAP_THRESHOLD). Left to grow by chance, a step of
    48 sequences gave 18 MiB back each time and spent a tenth of its time faulting them in again.
    """
    torch.empty(LARGEST_KEPT, dtype=torch.uint8)


def total_memory() -> int:
    """Bytes of the machine, or of the container if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (path.read_text(encoding="ascii").strip() for path in CGROUP_LIMITS if path.is_file())
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])


def reset_peak() -> None:
    """Measure the peak anew from here on."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        # The peak then counts loading too: it errs to the safe side.
        return


def peak_memory() -> int:
    """The most bytes this process has had in use at once since `reset_peak`."""
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
