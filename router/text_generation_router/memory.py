"""The memory of the router: what a burst of large bodies took goes back to the system.

glibc keeps freed memory in its heaps, and after the first large free it takes large blocks from there, too. A fixed limit
gives each body pages of its own, which go back at once.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import resource
from collections.abc import Callable
from pathlib import Path

MAPPED_BYTES = 1 << 17
"""Blocks from this size on have pages of their own."""
HEAPS = 2
"""Heaps of glibc; its default of eight for each core would each keep its own free memory."""
CHECK_S = 5.0
"""Seconds between two looks at the memory."""
GROWTH, GROWTH_IF_BUSY = 32 << 20, 256 << 20
"""Growth after which free memory is collected: while no request runs, and while some do."""
NEWEST_OBJECTS = 5000
"""Objects among which cycles are searched at a time: a millisecond or two."""

_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # malloc.h
_STATM = Path("/proc/self/statm")


def configure_allocator() -> None:
    """Limit what the C library keeps of freed memory. Call before threads start; does nothing without glibc."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.mallopt(_MMAP_THRESHOLD, MAPPED_BYTES)
        library.mallopt(_ARENA_MAX, HEAPS)


def configure_collector() -> None:
    """Make garbage collection rare; call once everything that lives as long as the process exists."""
    gc.collect()
    gc.freeze()
    # Tokens are freed by reference counting: frequent searches for cycles would find none. But one search among the newest
    # objects must not hold up streams while a burst of requests makes many of them.
    gc.set_threshold(NEWEST_OBJECTS, 200, 50)


async def collect_growth(is_idle: Callable[[], bool]) -> None:
    """Collect garbage and return free memory whenever much was added; never returns."""
    lowest = _resident()
    while True:
        await asyncio.sleep(CHECK_S)
        resident = _resident()
        most = lowest + (GROWTH if is_idle() else GROWTH_IF_BUSY)
        if resident > most:
            # Most growth is free memory. The search for cycles takes the longer the more is in use, and all wait for it.
            await asyncio.to_thread(_return_free_memory)
            if _resident() > most or is_idle():
                gc.collect()
                await asyncio.to_thread(_return_free_memory)
            lowest = _resident()
        lowest = min(lowest, resident)


def _return_free_memory() -> None:
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def _resident() -> int:
    """Resident memory in bytes; 0 where the system does not tell."""
    if not _STATM.exists():
        return 0
    return int(_STATM.read_text().split()[1]) * resource.getpagesize()
