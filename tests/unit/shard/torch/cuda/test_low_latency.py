"""Low-latency all-reduce and all-gather between processes with shared inboxes, in Triton's interpreter on the CPU.

The processes run this file. Each maps one file per inbox and writes its results to another file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor

from text_generation_shard.engines.torch.kernels.low_latency import BLOCK, LowLatencyCollectives, inbox_shape

CAPACITY = 3 * BLOCK
# Elements: part of a region, a whole one, several, one more element; a small collective does not use the last regions.
SIZES = [1, BLOCK, 2 * BLOCK + 1, 5, CAPACITY, BLOCK + 1, CAPACITY - 1]
# (rows, columns): rows that begin within a region; one row; exactly one region.
SHAPES = [(3, 200), (1, 2 * BLOCK + 1), (4, 64), (2, 1)]
SIZE = 3
"""Ranks. A group of two is that of `test_symmetric`."""
LATE_TURNS = 2
"""Consecutive collectives in which one rank is late."""
EDGE_TURNS = 3
EDGES = [2**31 - 2, 2**32 - 2]
"""Epochs shortly before their lowest 32 bits change sign, and shortly before they wrap to zero."""

Results = dict[str, list[Tensor]]


def draw(rank: int, turn: int, *shape: int) -> Tensor:
    """Return a rank's input of a turn. The sums depend on the order of addition; the first element is negative zero."""
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    values = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-3, 4, shape, generator=generator)
    values[..., 0] = -0.0
    return values


@dataclass(frozen=True)
class Member:
    """One of the processes: a rank of the group."""

    rank: int
    folder: Path

    def low_latency(self, name: str, epoch: int = 1) -> LowLatencyCollectives:
        """Create the collectives on the inbox files of this name, with the given next epoch."""
        inboxes = [self._map(f"{name}: {rank}") for rank in range(SIZE)]
        MAPPED.extend(inboxes)
        low_latency = LowLatencyCollectives(self.rank, inboxes[self.rank], [inbox.data_ptr() for inbox in inboxes])
        low_latency._epochs.fill_(epoch)
        return low_latency

    def _map(self, name: str) -> Tensor:
        shape = inbox_shape(SIZE, CAPACITY)
        return torch.from_file(str(self.folder / name), shared=True, size=prod(shape), dtype=torch.int64).view(shape)

    def summed(self, low_latency: LowLatencyCollectives, turn: int, elements: int) -> Tensor:
        tensor = draw(self.rank, turn, elements)
        low_latency.all_reduce(tensor)
        return tensor

    def gathered(self, low_latency: LowLatencyCollectives, turn: int, rows: int, columns: int) -> Tensor:
        # The padding of rows must not be written.
        out = torch.full((rows, SIZE * columns + 3), -1.0)
        low_latency.all_gather(draw(self.rank, turn, rows, columns), out[:, :-3])
        return out

    def results(self) -> Results:
        sums, gathers, uneven = (self.low_latency(name) for name in ("sums", "gathers", "uneven"))
        results = {
            "sums": [self.summed(sums, turn, elements) for turn, elements in enumerate(SIZES)],
            "gathers": [self.gathered(gathers, turn, *shape) for turn, shape in enumerate(SHAPES)],
            "uneven": [],
        }
        for turn in range(LATE_TURNS * SIZE):
            # The ranks are late in turn; the others run ahead as far as they can.
            for _ in range(10 if turn // LATE_TURNS == self.rank else 0):
                draw(0, turn, 100_000)
            results["uneven"].append(self.summed(uneven, turn, BLOCK))
        for edge in EDGES:
            low_latency = self.low_latency(f"edge {edge}", edge)
            results[f"edge {edge}"] = [self.summed(low_latency, turn, BLOCK) for turn in range(EDGE_TURNS)]
        return results


MAPPED: list[Tensor] = []
"""Keeps the inboxes mapped: the collectives hold only their addresses."""


@pytest.fixture(scope="module")
def results() -> list[Results]:
    """Run all ranks; return their results."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        for name in ("sums", "gathers", "uneven", *(f"edge {edge}" for edge in EDGES)):
            for rank in range(SIZE):
                with Path(folder, f"{name}: {rank}").open("wb") as inbox:
                    inbox.truncate(8 * prod(inbox_shape(SIZE, CAPACITY)))
        members = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), folder],
                env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            )
            for rank in range(SIZE)
        ]
        try:
            assert [member.wait(60) for member in members] == [0] * SIZE
        finally:
            for member in members:
                member.kill()
                member.wait()
        return [torch.load(f"{folder}/results: {rank}") for rank in range(SIZE)]


def draws(turn: int, *shape: int) -> list[Tensor]:
    return [draw(rank, turn, *shape) for rank in range(SIZE)]


def total(turn: int, elements: int) -> Tensor:
    """Return the float32 sum in rank order."""
    first, *others = draws(turn, elements)
    for other in others:
        first += other
    return first


def check(results: list[Results], name: str, expected: list[Tensor]) -> None:
    for own in results:
        for found, wanted in zip(own[name], expected, strict=True):
            assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


@pytest.mark.full
def test_all_reduce_adds_in_rank_order_with_the_same_bits_on_all_ranks(results: list[Results]) -> None:
    check(results, "sums", [total(turn, elements) for turn, elements in enumerate(SIZES)])
    # A late rank gets all values.
    check(results, "uneven", [total(turn, BLOCK) for turn in range(LATE_TURNS * SIZE)])
    for edge in EDGES:  # epochs may exceed 32 bits
        check(results, f"edge {edge}", [total(turn, BLOCK) for turn in range(EDGE_TURNS)])


@pytest.mark.full
def test_all_gather_concatenates_and_leaves_the_padding_alone(results: list[Results]) -> None:
    expected = [
        torch.cat([*draws(turn, rows, columns), torch.full((rows, 3), -1.0)], dim=1)
        for turn, (rows, columns) in enumerate(SHAPES)
    ]
    check(results, "gathers", expected)


def test_a_peer_may_be_one_collective_ahead(device: torch.device) -> None:
    inbox, peers = (torch.zeros(inbox_shape(2, BLOCK), dtype=torch.int64, device=device) for _ in range(2))
    low_latency = LowLatencyCollectives(0, inbox, [inbox.data_ptr(), peers.data_ptr()])
    # The peer started epoch 2 when it had the values of epoch 1, before this rank reads its own inbox.
    for epoch in (1, 2):
        inbox[epoch % 2, 1] = message(draw(1, epoch, BLOCK), epoch).to(device)
    for epoch in (1, 2):
        tensor = draw(0, epoch, BLOCK).to(device)
        low_latency.all_reduce(tensor)
        assert torch.equal(tensor.cpu(), draw(0, epoch, BLOCK) + draw(1, epoch, BLOCK))
        assert torch.equal(peers[epoch % 2, 0].cpu(), message(draw(0, epoch, BLOCK), epoch))


def message(values: Tensor, epoch: int) -> Tensor:
    """Return `values` as they are sent."""
    return values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF | epoch << 32


if __name__ == "__main__":
    member = Member(int(sys.argv[1]), Path(sys.argv[2]))
    torch.save(member.results(), member.folder / f"results: {member.rank}")
