"""CUDA graphs for a CPU: operations that are recorded, and repeated in the same memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from text_generation_shard.engines.torch.runner.decode_graphs import Work


class Tape(TorchDispatchMode):
    """A CUDA graph for a CPU: records operations and repeats them in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[tuple[Callable[[], object], object]] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        call = partial(func, *args, **(kwargs or {}))
        result = call()
        self._kept.append((call, result))
        return result

    def replay(self) -> None:
        for call, before in self._kept:
            for old, new in zip(tensors(before), tensors(call()), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def tensors(result: object) -> list[Tensor]:
    return [part for part in (result if isinstance(result, (list, tuple)) else [result]) if isinstance(part, Tensor)]


class Tapes:
    """Does what a `GraphPool` does, on a CPU."""

    def begin(self) -> None:
        self._tape = Tape()
        self._tape.__enter__()

    def end(self) -> Work:
        self._tape.__exit__(None, None, None)
        return self._tape.replay
