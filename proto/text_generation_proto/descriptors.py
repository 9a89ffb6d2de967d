"""The limit of open file descriptors."""

from __future__ import annotations

import resource
from contextlib import suppress

MOST_DESCRIPTORS = 1 << 20
"""Highest soft limit set. Some programs close every descriptor up to the limit, and containers may allow a billion."""


def raise_descriptor_limit() -> None:
    """Raise the soft limit of descriptors to the hard one. Child processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # refused in a sandbox: the old limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
