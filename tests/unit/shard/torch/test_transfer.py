"""Weight copies by several readers, each with its own buffers; to a GPU if there is one."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from text_generation_shard.engines.torch.weights import transfer
from text_generation_shard.engines.torch.weights.transfer import Transfer, copy_all, copy_through

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


def transfers(device: torch.device) -> list[tuple[Transfer, Tensor]]:
    """Return transfers, and what their targets must hold."""
    pairs = [(source, torch.full(source.shape, 7.0, device=device).to(source.dtype)) for source in sources()]
    pairs += [(source, torch.zeros(source.shape, device=device)) for source in sources()[:4]]
    copies = [(Transfer.of(source, target), source) for source, target in pairs]
    weight, factors = sources()[4].float(), torch.tensor([[2.0], [3.0], [5.0]])
    computed = Transfer(lambda rows: weight[rows] * factors[rows], torch.zeros(3, 8, device=device), 24)
    return [*copies, (computed, weight * factors)]


def assert_copied(pairs: Sequence[tuple[Transfer, Tensor]]) -> None:
    for each, expected in pairs:
        assert torch.equal(each.target.cpu().float(), expected.float())


@pytest.mark.parametrize("buffer_bytes", [128, 1 << 20])
def test_everything_is_copied_and_converted(monkeypatch: pytest.MonkeyPatch, buffer_bytes: int) -> None:
    monkeypatch.setattr(transfer, "BUFFER_BYTES", buffer_bytes)
    wanted = transfers(DEVICE)
    assert list(copy_all([each for each, _ in wanted])) == [each.nbytes for each, _ in wanted]
    assert_copied(wanted)


def test_readers_run_concurrently_and_are_waited_for() -> None:
    """Each copier waits in its first copy until all copiers have one."""
    barrier = threading.Barrier(3)
    copiers = [BufferCopier(barrier) for _ in range(3)]
    wanted = transfers(torch.device("cpu")) * 3
    with torch.inference_mode():
        inside = Transfer.of(torch.ones(4), torch.zeros(4))
    everything = [*wanted, (inside, torch.ones(4))]
    assert sum(copy_through(copiers, [each for each, _ in everything])) == sum(each.nbytes for each, _ in everything)
    assert_copied(everything)
    assert all(copier.copied and copier.waited for copier in copiers)


def test_the_first_error_stops_the_copy() -> None:
    copier = BufferCopier()
    wrong = Transfer.of(torch.ones(3), torch.zeros(4))
    wanted = [wrong, *(each for each, _ in transfers(torch.device("cpu")) * 50)]
    with pytest.raises((ValueError, RuntimeError)):
        list(copy_through([copier], wanted))
    assert copier.waited
    assert len(copier.copied) < len(wanted)


def test_chunks_are_whole_rows_of_limited_size() -> None:
    whole = Transfer.of(torch.arange(20.0).view(5, 4), torch.zeros(5, 4, dtype=torch.bfloat16))
    assert [chunk.target.shape[0] for chunk in whole.chunks(17)] == [2, 2, 1]
    assert [chunk.target.shape[0] for chunk in whole.chunks(1)] == [1] * 5
    for chunk in whole.chunks(17):
        chunk.write(chunk.target)
    assert whole.target.flatten().tolist() == list(range(20))
    assert list(copy_all([])) == []
