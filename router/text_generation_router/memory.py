"""The memory of the router: large bodies go back to the system, and garbage collection is rare.

glibc keeps freed memory in its heaps, and after the first large free it takes large blocks from there, too. A fixed limit
gives each body of a mebibyte and more pages of its own, which go back at once.
"""

import asyncio
import ctypes
import gc

MAPPED_BYTES = 1 << 20
"""Blocks from this size on have pages of their own. With 128 KiB the copies of a prompt of 100,000 tokens cost 2,200 page faults."""
KEPT_BYTES = 16 << 20
"""Freed memory at the end of a heap that is not given back."""
GIVE_BACK_S = 10.0
"""Seconds between two searches for free memory among used blocks. One takes 0.01 ms, and 9 ms if it finds 240 MB."""
HEAPS = 2
"""Heaps of glibc; its default of eight for each core would each keep its own free memory."""
NEWEST_OBJECTS = 5000
"""Objects among which cycles are searched at a time: a millisecond or two."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # malloc.h


def configure_allocator() -> None:
    """Limit what the C library keeps of freed memory. Call before threads start; does nothing without glibc."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.mallopt(_MMAP_THRESHOLD, MAPPED_BYTES)
        library.mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
        library.mallopt(_ARENA_MAX, HEAPS)


async def give_back_memory() -> None:
    """Give free memory back to the system until cancelled, as after a burst of large bodies. Returns without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while trim is not None:
        await asyncio.sleep(GIVE_BACK_S)
        trim(0)


def configure_collector() -> None:
    """Make garbage collection rare; call once everything that lives as long as the process exists."""
    gc.collect()
    gc.freeze()
    # Tokens are freed by reference counting: frequent searches for cycles would find none. But one search among the newest
    # objects must not hold up streams while a burst of requests makes many of them.
    gc.set_threshold(NEWEST_OBJECTS, 200, 50)
