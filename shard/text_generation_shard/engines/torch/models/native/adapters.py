"""The LoRA adapters of a native model: finds the layers that they change, and loads their matrices, or one rank's part of them.

All adapters are held in host memory, pinned for a GPU; those in use have places in the stacks on the device. An adapter that comes
while the model serves is read in a thread of its own.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from text_generation_common.lora import AdapterSource
from text_generation_common.one_line import one_line, typed_line
from text_generation_shard.adapters import WEIGHTS, LoraAdapter, LoraRoom
from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.layers.adapted_linear import (
    AdaptedLinear,
    AdapterPlaces,
    AdapterStore,
    StepAdapters,
)
from text_generation_shard.engines.torch.layers.linear import ParallelLinear, Projection
from text_generation_shard.engines.torch.layers.quantized.choice import QuantizedLinear
from text_generation_shard.engines.torch.weights.checkpoint import Checkpoint, text_name

MAX_SERVED_RANK = 256
"""Limit of the rank: PEFT's adapters have 4 to 256."""
ROWS_AT_ONCE = 4096
"""Rows of a weight that are compared at a time: a whole one may have gigabytes."""
Matrices = list[tuple[Tensor, Tensor]]
"""The packed matrices of an adapter for each of the places."""


class ModelAdapters(StepAdapters, AdapterStore):
    """The adapters of a model, in `dtype`. Give its linear layers to `adapt`, call `check`, load the model, then call `load`."""

    def __init__(self, adapters: Sequence[LoraAdapter], dtype: torch.dtype, room: LoraRoom) -> None:
        super().__init__(room.slots)
        self._dtype, self._room = dtype, room
        self._adapters = adapters
        self._changed = {text_name(name) for adapter in adapters for name in adapter.changes}
        self._held: dict[str, Future[Matrices]] = {}
        """The adapters that are loaded, or being read."""
        self._reader = ThreadPoolExecutor(1, "adapters")
        self.read: Callable[[AdapterSource], LoraAdapter]
        """Reads and checks the description of an adapter that comes while the model serves."""
        self._places: list[AdapterPlaces] = []
        self._served: dict[str, tuple[int, int]] = {}
        """Shapes of the projections that adapters may change."""
        self._weights: dict[str, str] = {}
        """The weights of the embedding and the LM head in the checkpoint."""

    @property
    def nbytes(self) -> int:
        """Bytes of the places for adapters, on this rank."""
        return sum(each.nbytes for each in self._places)

    def adapt(
        self, linear: ParallelLinear | QuantizedLinear, projections: Sequence[Projection], device: torch.device
    ) -> ParallelLinear | QuantizedLinear | AdaptedLinear:
        """Return a linear layer with places for adapters; the same one if no adapter changes it."""
        shapes = {each.name: each.shape for each in projections}
        self._served |= shapes
        if not (self._room.takes_others or self._changed & shapes.keys()):
            return linear
        adapted = AdaptedLinear(linear, projections, self._room.rank, self, device, self._dtype)
        self._places.append(adapted)
        return adapted

    def places(self, projection: Projection, weight: str, device: torch.device) -> AdapterPlaces | None:
        """Return places for changes of the embedding or the LM head, whose `weight` in the checkpoint is named.

        None if no adapter of the start changes it: places take memory, and time of each step with adapters.
        """
        self._served[projection.name], self._weights[projection.name] = projection.shape, weight
        if projection.name not in self._changed:
            return None
        self._places.append(AdapterPlaces([projection], self._room.rank, self.count, device, self._dtype))
        return self._places[-1]

    def check(self) -> None:
        """Raise EngineError for an adapter of the start that does not fit the layers given to `adapt`."""
        for adapter in self._adapters:
            self._check(adapter)

    def _check(self, adapter: LoraAdapter) -> None:
        limit = min(self._room.rank, MAX_SERVED_RANK)
        for key, change in adapter.changes.items():
            name, problem, own = text_name(key), None, (change.outputs, change.inputs)
            if name not in self._served:
                kinds = sorted({served.rpartition(".")[2] for served in self._served})
                problem = f"changes {name}, and adapters of this model may change {', '.join(kinds)}"
            elif self._served[name] != own:
                problem = f"changes a {name} of {_by(own)} values, and that of this model has {_by(self._served[name])}"
            elif name in self._weights.keys() - self._changed:
                problem = f"changes {name}, for which there is room only if an adapter of --lora-adapters changes it"
            elif change.rank > limit:
                serves = (
                    f"--max-lora-rank is {limit}"
                    if limit < MAX_SERVED_RANK
                    else f"the torch engine serves ranks up to {limit}"
                )
                problem = f"has rank {change.rank}, and {serves}"
            if problem is not None:
                raise EngineError(f"the LoRA adapter {adapter.name} {problem}")

    def load(self) -> None:
        """Load the adapters of the start into host memory. Raises EngineError."""
        for adapter in self._adapters:
            self._held[adapter.name] = self._reader.submit(self._load, adapter)
        for loading in self._held.values():
            loading.result()

    def _load(self, adapter: LoraAdapter) -> Matrices:
        if self._places[0].device.type == "cuda":
            torch.cuda.set_device(self._places[0].device)  # of this thread, which pins memory
        path, matrices = adapter.folder / WEIGHTS, dict[str, tuple[Tensor, Tensor]]()
        try:
            with safe_open(path, framework="pt") as file:
                for name, change in adapter.changes.items():
                    a, b = (file.get_tensor(key).float() for key in change.keys)
                    matrices[text_name(name)] = a, b * change.scale
                    if change.base is not None and adapter.model is not None:
                        stored = self._weights.get(text_name(name), "")
                        if not _is_stored(file, change.base, stored, adapter.model):
                            raise EngineError(f"{path}: {change.base} is not the embedding or LM head of the model")
        except (OSError, RuntimeError, SafetensorError) as error:
            raise EngineError(f"{path} cannot be read: {one_line(error)}") from None
        return [each.packed(matrices) for each in self._places]

    def _read(self, name: str, folder: str) -> Matrices:
        try:
            adapter = self.read(AdapterSource(name, folder))
            self._check(adapter)
            return self._load(adapter)
        except (FileNotFoundError, EngineError):
            raise
        except Exception as error:
            raise EngineError(f"the LoRA adapter {name} cannot be loaded: {typed_line(error)}") from error

    @torch.inference_mode()
    def change(self, command: str, name: str, argument: str | int) -> int | None:
        match command, argument:
            case "read", str(folder):
                self._held[name] = self._reader.submit(self._read, name, folder)
            case "loaded", _:
                held = self._held[name]
                return (held.exception() is None) if held.done() else -1
            case "place", int(place):
                for each, matrices in zip(self._places, self._held[name].result(), strict=True):
                    each.place(place, *matrices)
            case "drop", _:
                self._held.pop(name).cancel()
        return None

    def problem(self, name: str) -> BaseException | None:
        return self._held[name].exception()


def _is_stored(file: safe_open, key: str, name: str, folder: Path) -> bool:
    """Return True if a checkpoint has this weight of an adapter's file, up to rounding to its dtype."""
    checkpoint = Checkpoint(folder, text_only=True)
    weight = file.get_slice(key)  # type: ignore[no-untyped-call]
    if name not in checkpoint or [*(own := checkpoint.map([name])[name]).shape] != weight.get_shape():
        return False
    pieces = [slice(first, first + ROWS_AT_ONCE) for first in range(0, len(own), ROWS_AT_ONCE)]
    return all(torch.equal(own[piece].to((given := weight[piece]).dtype), given) for piece in pieces)


def _by(shape: tuple[int, int]) -> str:
    return " × ".join(map(str, shape))
