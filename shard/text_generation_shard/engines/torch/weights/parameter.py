"""A parameter of the model, as a part of a tensor of the checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedSource:
    """The weight of a quantized checkpoint that a parameter is computed from, without dequantizing it."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[Mapping[str, Tensor], slice], Tensor]
    """Returns rows of the parameter (rows of the whole, not of this rank) from the tensors that stand for the weight."""
    spread: float | None = None
    """Standard deviation of random codes without their scale; None: of FP8, in which some codes are no numbers."""


@dataclass(frozen=True, slots=True)
class OtherSource:
    """A tensor that a checkpoint may have instead of one with the name of the parameter."""

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    """The expert, if the tensor has the weights of all experts of a layer: [experts, outputs, inputs]."""
    transposed: bool = False
    """True: [experts, inputs, outputs]."""
    first_row: int = 0
    """The row of the expert's weight at which the parameter starts."""

    def select(self, source: Tensor, rows: int) -> Tensor:
        """Return a view of the whole parameter, which has `rows` rows."""
        if self.expert is not None:
            source = source[self.expert].t() if self.transposed else source[self.expert]
        return source.narrow(0, self.first_row, rows)


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """This rank's part of a checkpoint tensor."""

    tensor: Tensor
    """Loaded from source[starts[0] : starts[0] + tensor.shape[0], …]."""
    shape: tuple[int, ...]
    """Shape of the whole tensor in the checkpoint; a zero-dimensional one counts as (1,)."""
    starts: tuple[int, ...]
    name: str = ""
    """Name of the tensor in the checkpoint, if it is not that of the parameter."""
    packed: PackedSource | None = None
    """None: the parameter is a tensor of the checkpoint, dequantized if it is quantized there."""
    other: OtherSource | None = None

    @classmethod
    def whole(cls, tensor: Tensor) -> "ParameterShard":
        return cls(tensor, tuple(tensor.shape), (0,) * tensor.ndim)

    def select(self, source: Tensor) -> Tensor:
        """Return a view of this part of the checkpoint tensor."""
        for dim, start in enumerate(self.starts):
            source = source.narrow(dim, start, self.tensor.shape[dim])
        return source


NamedParameters = Mapping[str, Tensor | ParameterShard]
"""Parameters by checkpoint name; a plain tensor takes the whole checkpoint tensor."""
