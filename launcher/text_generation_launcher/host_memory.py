"""The memory of the host cache: a file without a name, which the launcher holds and its shards inherit.

It outlives shards and routers. The kernel frees it when the launcher and all of its children have ended, however they do.
"""

import mmap
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from text_generation_common.exit_codes import CannotServe
from text_generation_common.memory import total_memory


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The memory; of a host cache that is only planned, its size."""

    size: int = 0
    descriptor: int = 0
    name: str = ""
    """Names its contents: those of another launcher are others."""

    def part(self, number: int, parts: int) -> tuple[int, int]:
        """Return the first byte and the bytes of one of several equal parts, in whole pages."""
        size = self.size // parts // mmap.PAGESIZE * mmap.PAGESIZE
        return number * size, size


NO_MEMORY = HostMemory()


def check_host_memory(size: int, kept: float) -> None:
    """Raise CannotServe if this machine, or the container, has not so much memory beside the share `kept` for shards on its CPUs."""
    if size > (total := total_memory() * (1 - kept)):
        raise CannotServe(
            f"--host-cache-size: {size / 2**30:.1f} GiB, and the machine has {total / 2**30:.1f} GiB for it"
        )


@contextmanager
def host_memory(size: int, kept: float = 0.0) -> Iterator[HostMemory]:
    """Yield memory of `size` bytes; it is taken from the machine as it is written. Raises CannotServe if there is too little."""
    check_host_memory(size, kept)
    if not size:
        yield NO_MEMORY
        return
    descriptor = os.memfd_create("host cache")
    try:
        os.ftruncate(descriptor, size)
        yield HostMemory(size, descriptor, secrets.token_hex(8))
    finally:
        os.close(descriptor)
