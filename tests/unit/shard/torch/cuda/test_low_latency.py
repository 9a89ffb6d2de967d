"""Sums and gathers between processes that have each other's inboxes mapped, as GPUs have: in Triton's interpreter, on the CPU.

The processes run this file. Each maps one file an inbox, makes its created, and leaves its results in another file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor

from text_generation_shard.engines.torch.cuda.kernels.low_latency import BLOCK, LowLatencyCollectives, inbox_shape

CAPACITY = 3 * BLOCK
# Elements: less than a region, all of one and of several, one more; a small one does not touch the last regions.
SIZES = [1, BLOCK, 2 * BLOCK + 1, 5, CAPACITY, BLOCK + 1, CAPACITY - 1]
# (rows, columns): rows that begin within a region; one row; a region to the element.
SHAPES = [(3, 200), (1, 2 * BLOCK + 1), (4, 64), (2, 1)]
GROUPS = [3, 2]
"""PlanSizes of groups, one after the other: the last rank of the first one is done then."""
LATE_TURNS = 2
"""In a row, of each rank."""
EDGE_TURNS = 5
EDGES = [2**31 - 3, 2**32 - 3]
"""Epochs shortly before their lowest 32 bits change sign, and are zero again."""

Results = dict[str, list[Tensor]]


def draw(rank: int, turn: int, *shape: int) -> Tensor:
    """What a rank gives to the low_latency of a turn. The sums depend on their order; the first is that of negative zeros."""
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    values = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-3, 4, shape, generator=generator)
    values[..., 0] = -0.0
    return values


@dataclass(frozen=True)
class Member:
    """One of the processes."""

    rank: int
    size: int
    folder: Path

    def low_latency(self, name: str, epoch: int = 1) -> LowLatencyCollectives:
        """One whose inboxes are the files of that name, and whose next epoch is a given one."""
        inboxes = [self._map(f"{name} of {self.size}: {rank}") for rank in range(self.size)]
        MAPPED.extend(inboxes)
        low_latency = LowLatencyCollectives(self.rank, inboxes[self.rank], [inbox.data_ptr() for inbox in inboxes])
        low_latency._epochs.fill_(epoch)
        return low_latency

    def _map(self, name: str) -> Tensor:
        shape = inbox_shape(self.size, CAPACITY)
        return torch.from_file(str(self.folder / name), shared=True, size=prod(shape), dtype=torch.int64).view(shape)

    def summed(self, low_latency: LowLatencyCollectives, turn: int, elements: int) -> Tensor:
        tensor = draw(self.rank, turn, elements)
        low_latency.all_reduce(tensor)
        return tensor

    def gathered(self, low_latency: LowLatencyCollectives, turn: int, rows: int, columns: int) -> Tensor:
        # Rows are padded, and nothing is to be written there.
        out = torch.full((rows, self.size * columns + 3), -1.0)
        low_latency.all_gather(draw(self.rank, turn, rows, columns), out[:, :-3])
        return out

    def results(self) -> Results:
        sums, gathers, uneven = (self.low_latency(name) for name in ("sums", "gathers", "uneven"))
        results = {
            "sums": [self.summed(sums, turn, elements) for turn, elements in enumerate(SIZES)],
            "gathers": [self.gathered(gathers, turn, *shape) for turn, shape in enumerate(SHAPES)],
            "uneven": [],
        }
        for turn in range(LATE_TURNS * self.size):
            # Now this rank is late, now that one: the others are ahead of it as far as they can be.
            for _ in range(10 if turn // LATE_TURNS == self.rank else 0):
                draw(0, turn, 100_000)
            results["uneven"].append(self.summed(uneven, turn, BLOCK))
        for edge in EDGES:
            low_latency = self.low_latency(f"edge {edge}", edge)
            results[f"edge {edge}"] = [self.summed(low_latency, turn, BLOCK) for turn in range(EDGE_TURNS)]
        return results


MAPPED: list[Tensor] = []
"""For as long as the process lives: an low_latency knows its peers' inboxes by their addresses alone."""


@dataclass(frozen=True)
class Ranks:
    size: int
    results: list[Results]
    """Of each rank."""

    def draws(self, turn: int, *shape: int) -> list[Tensor]:
        return [draw(rank, turn, *shape) for rank in range(self.size)]

    def total(self, turn: int, elements: int) -> Tensor:
        """The sum in float32 in the order of ranks."""
        first, *others = self.draws(turn, elements)
        for other in others:
            first += other
        return first

    def expect(self, name: str, expected: list[Tensor]) -> None:
        for results in self.results:
            for found, wanted in zip(results[name], expected, strict=True):
                assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Where each rank of each group has left its results."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        for size in GROUPS:
            for name in ("sums", "gathers", "uneven", *(f"edge {edge}" for edge in EDGES)):
                for rank in range(size):
                    with Path(folder, f"{name} of {size}: {rank}").open("wb") as inbox:
                        inbox.truncate(8 * prod(inbox_shape(size, CAPACITY)))
        members = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), folder],
                env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            )
            for rank in range(max(GROUPS))
        ]
        try:
            assert [member.wait(60) for member in members] == [0] * len(members)
        finally:
            for member in members:
                member.kill()
                member.wait()
        yield Path(folder)


@pytest.fixture(params=GROUPS)
def group(request: pytest.FixtureRequest, folder: Path) -> Ranks:
    size: int = request.param
    return Ranks(size, [torch.load(folder / f"results of {size}: {rank}") for rank in range(size)])


def test_sums_are_those_of_float32_in_the_order_of_ranks_and_the_same_everywhere(group: Ranks) -> None:
    group.expect("sums", [group.total(turn, elements) for turn, elements in enumerate(SIZES)])


def test_what_is_gathered_lies_side_by_side_and_beside_it_nothing_is_touched(group: Ranks) -> None:
    expected = [
        torch.cat([*group.draws(turn, rows, columns), torch.full((rows, 3), -1.0)], dim=1)
        for turn, (rows, columns) in enumerate(SHAPES)
    ]
    group.expect("gathers", expected)


def test_a_rank_that_is_late_loses_nothing(group: Ranks) -> None:
    group.expect("uneven", [group.total(turn, BLOCK) for turn in range(LATE_TURNS * group.size)])


@pytest.mark.parametrize("edge", EDGES)
def test_epochs_may_outgrow_the_bits_that_travel(group: Ranks, edge: int) -> None:
    group.expect(f"edge {edge}", [group.total(turn, BLOCK) for turn in range(EDGE_TURNS)])


def test_a_peer_may_be_one_exchange_ahead(device: torch.device) -> None:
    inbox, peers = (torch.zeros(inbox_shape(2, BLOCK), dtype=torch.int64, device=device) for _ in range(2))
    low_latency = LowLatencyCollectives(0, inbox, [inbox.data_ptr(), peers.data_ptr()])
    # The peer began epoch 2 when what it was sent in epoch 1 had come: before this rank looks into its own inbox.
    for epoch in (1, 2):
        inbox[epoch % 2, 1] = message(draw(1, epoch, BLOCK), epoch).to(device)
    for epoch in (1, 2):
        tensor = draw(0, epoch, BLOCK).to(device)
        low_latency.all_reduce(tensor)
        assert torch.equal(tensor.cpu(), draw(0, epoch, BLOCK) + draw(1, epoch, BLOCK))
        assert torch.equal(peers[epoch % 2, 0].cpu(), message(draw(0, epoch, BLOCK), epoch))


def message(values: Tensor, epoch: int) -> Tensor:
    """`values` as they travel."""
    return values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF | epoch << 32


if __name__ == "__main__":
    rank, folder_name = int(sys.argv[1]), sys.argv[2]
    for group_size in GROUPS:
        if rank < group_size:
            member = Member(rank, group_size, Path(folder_name))
            torch.save(member.results(), member.folder / f"results of {group_size}: {rank}")
