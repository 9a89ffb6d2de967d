"""How much memory a device has, and the most this process has used of it."""

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


def total_memory(device: torch.device) -> int:
    """Bytes of the device; of the machine, or the container if that is less, for the CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (path.read_text(encoding="ascii").strip() for path in CGROUP_LIMITS if path.is_file())
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])


def reset_peak(device: torch.device) -> None:
    """Measure the peak anew from here on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        # The peak then counts loading too: it errs to the safe side.
        return


def peak_memory(device: torch.device) -> int:
    """The most bytes in use at once since `reset_peak`: by torch on CUDA, by the whole process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
