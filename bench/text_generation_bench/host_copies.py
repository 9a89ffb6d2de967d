"""Measure the copies of the host cache: their speed, checksums included, and the time of steps beside them.

python -m text_generation_bench.host_copies [--device cuda] [--gib 8] [--layers 32] [--layer-kib 64]

A block has `layers` parts of `layer-kib` KiB, as the 16 tokens of an 8B model in bfloat16. The memory is shared and, on a GPU, pinned
as in a shard. Steps are stood in for by reads of 4 GiB of device memory, whose result is copied to the host.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import torch

from text_generation_proto.copies import CopiedBlocks, Copy
from text_generation_shard.__main__ import SWITCH_INTERVAL
from text_generation_shard.engines.torch.engine.host_cache import CHECK_BYTES, HostCopies

BLOCKS = 512
"""Blocks of a copy: those of a store."""
STEPS = 300
"""Enough for a 99th percentile."""


class CopiesUnderTest:
    """A device's cache and a host cache of `blocks` blocks each."""

    def __init__(self, device: torch.device, blocks: int, layers: int, layer_bytes: int) -> None:
        size = -(-blocks * (layers * layer_bytes + CHECK_BYTES) // 4096) * 4096
        file = os.memfd_create("host cache")
        os.ftruncate(file, size)
        self._copies = HostCopies(file, 0, size, device)
        parts = [torch.randint(0, 256, (blocks, layer_bytes), dtype=torch.uint8, device=device) for _ in range(layers)]
        self._copies.allocate([blocks], [parts])
        self._block_bytes, self._blocks = layers * layer_bytes, blocks
        self.gib = blocks * self._block_bytes / 2**30

    def copy(self, *, is_load: bool) -> float:
        """Copy all blocks; return GB/s."""
        ended = threading.Semaphore(0)
        started = time.perf_counter()
        firsts = range(0, self._blocks, BLOCKS)
        for number, first in enumerate(firsts):
            blocks = tuple(range(first, min(first + BLOCKS, self._blocks)))
            self._copies.begin(Copy(number, is_load, (CopiedBlocks(blocks, blocks, blocks),)), ended.release)
        for _ in firsts:
            ended.acquire()
        seconds = time.perf_counter() - started
        assert not any(copy.failed for copy in self._copies.take_ended()), "checksums are right"
        return self._blocks * self._block_bytes / seconds / 1e9


def steps(device: torch.device, beside: Callable[[], object]) -> list[float]:
    """Return the milliseconds of STEPS steps while a thread repeats `beside`."""
    memory = torch.zeros(1 << 30 if device.type == "cuda" else 1 << 24, dtype=torch.int32, device=device)
    is_cuda, over = device.type == "cuda", threading.Event()
    result = torch.empty((), dtype=torch.int64, pin_memory=is_cuda)

    def repeat() -> None:
        while not over.is_set():
            beside()

    thread = threading.Thread(target=repeat, daemon=True)  # an error of a step ends the program
    thread.start()
    found: list[float] = []
    for _ in range(STEPS + 1):
        started = time.perf_counter()
        result.copy_(memory.sum(), non_blocking=True)
        if is_cuda:
            torch.cuda.current_stream().synchronize()
        found.append((time.perf_counter() - started) * 1e3)
    over.set()
    thread.join()
    return sorted(found[1:])  # the first one also waits for the zeros


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--layer-kib", type=int, default=64)
    options = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL)  # steps and copies are launched by threads, as in a shard
    device, layer_bytes = torch.device(options.device), options.layer_kib << 10
    blocks = int(options.gib * 2**30) // (options.layers * layer_bytes)
    started = time.perf_counter()
    tested = CopiesUnderTest(device, blocks, options.layers, layer_bytes)
    print(f"{tested.gib:.1f} GiB mapped and pinned in {time.perf_counter() - started:.1f} s")
    for name, is_load in (("store", False), ("load", True)):
        tested.copy(is_load=is_load)
        print(f"{name:6} {statistics.median(tested.copy(is_load=is_load) for _ in range(3)):6.1f} GB/s")
    alone = steps(device, lambda: time.sleep(0.1))
    for name, is_load in (("stores", False), ("loads", True)):
        beside = steps(device, partial(tested.copy, is_load=is_load))
        for share in (0.5, 0.99):
            own, other = (each[int(len(each) * share)] for each in (alone, beside))
            print(f"step beside {name}, p{share * 100:.0f}: {other:.2f} ms, alone {own:.2f} ms")


if __name__ == "__main__":
    main()
