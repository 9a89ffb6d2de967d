"""The memory of this machine."""

import os
from pathlib import Path

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files with the memory limit of a container, by cgroup version 2 and 1."""


def total_memory() -> int:
    """Return the bytes of the machine, or of the container if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (path.read_text(encoding="ascii").strip() for path in CGROUP_LIMITS if path.is_file())
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])
