"""Weight copies by several readers, each with its own buffers; to a GPU if there is one."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from text_generation_shard.engines.torch import transfer
from text_generation_shard.engines.torch.transfer import Transfer, copy_all, copy_through

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class BufferCopier:
    """A copier within host memory through a small buffer, like PinnedCopier."""

    def __init__(self, barrier: threading.Barrier | None = None) -> None:
        self.copied: list[Transfer] = []
        self.waited = False
        self._barrier = barrier
        self._buffer = torch.empty(128, dtype=torch.uint8)

    def copy(self, transfer: Transfer) -> None:
        if self._barrier is not None and not self.copied:
            self._barrier.wait(10)
        self.copied.append(transfer)
        for chunk in transfer.chunks(128):
            staged = self._buffer[: chunk.target.nbytes].view(chunk.target.dtype).view(chunk.target.shape)
            chunk.write(staged, one_thread=True)
            chunk.target.copy_(staged)

    def wait(self) -> None:
        self.waited = True


def sources() -> list[Tensor]:
    wide = torch.randn(7, 30)
    return [
        wide[1:6, 3:20],
        wide.to(torch.bfloat16),
        wide.flatten().half(),
        torch.ones(1),
        torch.randn(3, 8).to(torch.float8_e4m3fn),
    ]


def transfers(device: torch.device) -> list[Transfer]:
    same = [Transfer(source, torch.full(source.shape, 7.0, device=device).to(source.dtype)) for source in sources()]
    other = [Transfer(source, torch.zeros(source.shape, device=device)) for source in sources()[:4]]
    scaled = Transfer(sources()[4], torch.zeros(3, 8, device=device), torch.tensor([[2.0], [3.0], [5.0]]))
    return [*same, *other, scaled]


def assert_copied(all_transfers: Sequence[Transfer]) -> None:
    for each in all_transfers:
        scales = 1.0 if each.row_scales is None else each.row_scales
        assert torch.equal(each.target.cpu().float(), each.source.float() * scales)


@pytest.mark.parametrize("buffer_bytes", [128, 1 << 20])
def test_everything_is_copied_and_converted(monkeypatch: pytest.MonkeyPatch, buffer_bytes: int) -> None:
    monkeypatch.setattr(transfer, "BUFFER_BYTES", buffer_bytes)
    wanted = transfers(DEVICE)
    assert list(copy_all(wanted)) == [each.source.nbytes for each in wanted]
    assert_copied(wanted)


def test_readers_run_concurrently_and_are_waited_for() -> None:
    """Each copier waits in its first copy until all copiers have one."""
    barrier = threading.Barrier(3)
    copiers = [BufferCopier(barrier) for _ in range(3)]
    wanted = transfers(torch.device("cpu")) * 3
    with torch.inference_mode():
        inside = Transfer(torch.ones(4), torch.zeros(4))
    assert sum(copy_through(copiers, [*wanted, inside])) == sum(each.source.nbytes for each in wanted) + 16
    assert_copied([*wanted, inside])
    assert all(copier.copied and copier.waited for copier in copiers)


def test_the_first_error_stops_the_copy() -> None:
    copier = BufferCopier()
    wrong = Transfer(torch.ones(3), torch.zeros(4))
    wanted = [wrong, *transfers(torch.device("cpu")) * 50]
    with pytest.raises((ValueError, RuntimeError)):
        list(copy_through([copier], wanted))
    assert copier.waited
    assert len(copier.copied) < len(wanted)


def test_chunks_are_whole_rows_of_limited_size() -> None:
    whole = Transfer(torch.arange(20.0).view(5, 4), torch.zeros(5, 4, dtype=torch.bfloat16))
    assert [chunk.target.shape[0] for chunk in whole.chunks(17)] == [2, 2, 1]
    assert [chunk.target.shape[0] for chunk in whole.chunks(1)] == [1] * 5
    assert torch.equal(torch.cat([chunk.source for chunk in whole.chunks(17)]), whole.source)
    assert list(copy_all([])) == []
