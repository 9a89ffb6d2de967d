"""The LoRA adapters of a native model: finds the layers that they change, and loads their matrices, or one rank's part of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from text_generation_common.one_line import one_line
from text_generation_shard.adapters import WEIGHTS, LoraAdapter
from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.layers.adapted_linear import AdaptedLinear, StepAdapters
from text_generation_shard.engines.torch.layers.linear import ParallelLinear, Projection
from text_generation_shard.engines.torch.layers.quantized.choice import QuantizedLinear
from text_generation_shard.engines.torch.weights.checkpoint import text_name

MAX_SERVED_RANK = 256
"""Limit of the rank: PEFT's adapters have 4 to 256."""


class ModelAdapters(StepAdapters):
    """The adapters of a model, in `dtype`. Give its linear layers to `adapt`, call `check`, load the model, then call `load`."""

    def __init__(self, adapters: Sequence[LoraAdapter], dtype: torch.dtype) -> None:
        super().__init__(len(adapters))
        self._dtype = dtype
        self._adapters = adapters
        self._changes = [{text_name(name): each for name, each in adapter.changes.items()} for adapter in adapters]
        self._linears: list[AdaptedLinear] = []
        self._served: dict[str, tuple[int, int]] = {}
        """Shapes of the projections that adapters may change."""

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices of all adapters, on this rank."""
        return sum(linear.nbytes for linear in self._linears)

    def adapt(
        self, linear: ParallelLinear | QuantizedLinear, projections: Sequence[Projection], device: torch.device
    ) -> ParallelLinear | QuantizedLinear | AdaptedLinear:
        """Return a linear layer with the changes of the adapters; the same one if none changes it."""
        shapes = {each.name: each.shape for each in projections}
        self._served |= shapes
        ranks = [changes[name].rank for changes in self._changes for name in shapes if name in changes]
        if not ranks:
            return linear
        self._linears.append(AdaptedLinear(linear, projections, max(ranks), self, device, self._dtype))
        return self._linears[-1]

    def check(self) -> None:
        """Raise EngineError for an adapter that does not fit the layers given to `adapt`."""
        for adapter, changes in zip(self._adapters, self._changes, strict=True):
            for name, change in changes.items():
                problem, own = None, (change.outputs, change.inputs)
                if name not in self._served:
                    kinds = sorted({served.rpartition(".")[2] for served in self._served})
                    problem = f"changes {name}, and adapters of this model may change {', '.join(kinds)} of a layer"
                elif self._served[name] != own:
                    problem = (
                        f"changes a {name} of {_by(own)} values, and that of this model has {_by(self._served[name])}"
                    )
                elif change.rank > MAX_SERVED_RANK:
                    problem = f"has rank {change.rank}, and the torch engine serves ranks up to {MAX_SERVED_RANK}"
                if problem is not None:
                    raise EngineError(f"the LoRA adapter {adapter.name} {problem}")

    def load(self) -> None:
        """Load the matrices of all adapters. Raises EngineError."""
        for number, (adapter, changes) in enumerate(zip(self._adapters, self._changes, strict=True)):
            path, matrices = adapter.folder / WEIGHTS, dict[str, tuple[Tensor, Tensor]]()
            try:
                with safe_open(path, framework="pt") as file:
                    for name, change in changes.items():
                        a, b = (file.get_tensor(f"{change.key}.lora_{side}.weight").float() for side in "AB")
                        matrices[name] = a, b * change.scale
            except (OSError, RuntimeError, SafetensorError) as error:
                raise EngineError(f"{path} cannot be read: {one_line(error)}") from None
            for linear in self._linears:
                linear.fill(number, matrices)


def _by(shape: tuple[int, int]) -> str:
    return " × ".join(map(str, shape))
