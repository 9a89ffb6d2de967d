"""The host cache of the torch engine: what is loaded is what was stored, byte by byte, or the load fails."""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from text_generation_proto.copies import CopiedBlocks, Copy, CopyEnd
from text_generation_shard.engines.torch.engine.host_cache import CHECK_BYTES, HostCopies

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE = 4 * mmap.PAGESIZE
BLOCKS = (20, 5, 3)
"""Host blocks of each group."""


@pytest.fixture
def descriptor() -> Iterator[int]:
    file = os.memfd_create("host")
    os.ftruncate(file, 2 * SIZE)
    yield file
    os.close(file)


def parts(seed: int, last: int = 640) -> list[list[Tensor]]:
    """Return a device's cache: two layers of a group, none of another, and one of the last."""
    torch.manual_seed(seed)
    return [
        [torch.randint(0, 256, (8, width), dtype=torch.uint8).to(DEVICE) for width in widths]
        for widths in ((160, 32), (), (last,))
    ]


def copied(cache: HostCopies, is_load: bool, *groups: CopiedBlocks) -> CopyEnd:
    ended = threading.Event()
    cache.begin(Copy(7, is_load, groups), ended.set)
    assert ended.wait(10)
    (end,) = cache.take_ended()
    assert end.number == 7
    return end


FULL, OTHER = CopiedBlocks((5, 0), (19, 2), (11, 12)), CopiedBlocks((7,), (1,), (13,))
NONE = CopiedBlocks((3,), (4,), (14,))


@pytest.mark.parametrize("last", [640, 641], ids=["words", "bytes"])
def test_another_shard_loads_what_was_stored(descriptor: int, last: int) -> None:
    before, after = parts(1, last), parts(2, last)
    cache = HostCopies(descriptor, SIZE, SIZE, DEVICE)
    cache.allocate(BLOCKS, before)
    assert not copied(cache, False, FULL, NONE, OTHER).failed
    cache.close()
    untouched = [[part.clone() for part in group] for group in after]
    other = HostCopies(descriptor, SIZE, SIZE, DEVICE)
    other.allocate(BLOCKS, after)
    loaded = CopiedBlocks((1, 3), FULL.host, FULL.tags), NONE, CopiedBlocks((0,), (1,), (13,))
    assert not copied(other, True, *loaded).failed
    for group, to, source in ((0, (1, 3), (5, 0)), (2, (0,), (7,))):
        for part, origin, same in zip(after[group], before[group], untouched[group], strict=True):
            assert torch.equal(part[list(to)], origin[list(source)])
            others = [index for index in range(8) if index not in to]
            assert torch.equal(part[others], same[others])
    assert not any(os.pread(descriptor, SIZE, 0)), "the part of another rank is untouched"


@pytest.mark.parametrize("harm", ["a byte of a block", "a byte of its checksum", "another tag"])
def test_a_load_of_another_block_fails(descriptor: int, harm: str) -> None:
    cache = HostCopies(descriptor, 0, SIZE, DEVICE)
    cache.allocate(BLOCKS, parts(1))
    copied(cache, False, FULL, NONE, OTHER)
    tags = [13]
    match harm:
        case "a byte of a block":
            at = 20 * 192 + 640 + 3
        case "a byte of its checksum":
            at = SIZE - CHECK_BYTES * sum(BLOCKS) + CHECK_BYTES * 26
        case _:
            at, tags = 0, [14]
    (byte,) = os.pread(descriptor, 1, at)
    os.pwrite(descriptor, bytes([byte ^ 4]), at)
    loaded = CopiedBlocks((0, 1), FULL.host, FULL.tags), NONE, CopiedBlocks((2,), (1,), tuple(tags))
    assert copied(cache, True, *loaded).failed == (3,), "the index counts over all groups"


@pytest.mark.parametrize(
    "blocks", [CopiedBlocks((8,), (0,), (0,)), CopiedBlocks((0,), (20,), (0,)), CopiedBlocks((0,), (0,), ())]
)
def test_a_copy_of_blocks_that_do_not_exist_fails(descriptor: int, blocks: CopiedBlocks) -> None:
    cache = HostCopies(descriptor, 0, SIZE, DEVICE)
    cache.allocate(BLOCKS, parts(1))
    before = Path(f"/proc/self/fd/{descriptor}").read_bytes()
    assert copied(cache, False, blocks).failed == (0,)
    assert Path(f"/proc/self/fd/{descriptor}").read_bytes() == before


def test_a_block_that_another_shard_still_stores_is_not_stored(descriptor: int) -> None:
    cache = HostCopies(descriptor, SIZE, SIZE, DEVICE)
    cache.allocate(BLOCKS, parts(1))
    at = 2 * SIZE - CHECK_BYTES * (sum(BLOCKS) - 19)
    late = f"import fcntl; fcntl.lockf({descriptor}, fcntl.LOCK_EX, {CHECK_BYTES}, {at}); print(); input()"
    with Popen([sys.executable, "-c", late], stdin=PIPE, stdout=PIPE, pass_fds=[descriptor]) as shard:
        assert shard.stdout is not None
        shard.stdout.readline()
        with capture_logs() as logs:
            assert copied(cache, False, FULL, NONE, OTHER).failed == (0, 1, 2, 3)
        assert [(each["log_level"], each["blocks"]) for each in logs] == [("warning", 4)]
        assert not any(os.pread(descriptor, 2 * SIZE, 0))
        assert not copied(cache, False, CopiedBlocks((5, 0), (18, 2), (11, 12)), NONE, OTHER).failed
        assert copied(cache, True, FULL).failed == (0,), "a load needs no lock"
    assert not copied(cache, False, FULL, NONE, OTHER).failed
    assert not copied(cache, True, FULL, NONE, OTHER).failed
    cache.close()
