"""The grouped product of a mixture of experts: its operands, and its computation in plain torch.

Every token has k experts. For each of these pairs, out = weight · down(act(gate(x)) · up(x)); the results of a token's k experts
are added in the order of its ids, so that the sum does not depend on the other tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

Activation = Callable[[Tensor], Tensor]
"""Maps the products [rows, 2 · inner] of gate and up to [rows, inner]."""

_KINDS: dict[str, Activation] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """act(gate) · up. Called, it computes in the dtype of its input; the kernels fuse it into the product before it."""

    kind: str
    """"silu", "gelu", "gelu_pytorch_tanh", or "clamped_swiglu": (up + 1) · gate · sigmoid(alpha · gate), of gpt-oss."""
    interleaved: bool = False
    """True: gate and up alternate, gate first. False: all of gate comes first."""
    alpha: float = 1.702
    limit: float = 7.0
    """Clamps up on both sides and gate from above, for "clamped_swiglu" alone."""

    def __call__(self, gate_up: Tensor) -> Tensor:
        gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if self.interleaved else gate_up.chunk(2, dim=-1)
        if self.kind != "clamped_swiglu":
            return _KINDS[self.kind](gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)


@dataclass(frozen=True, slots=True)
class ExpertLinear:
    """A product with one weight per expert. The weights may be views with any strides."""

    weight: Tensor
    """[experts, outputs, inputs]."""
    bias: Tensor | None = None
    """[experts, outputs]."""

    def of(self, expert: int, x: Tensor) -> Tensor:
        """Return the product of one expert with `x` [rows, inputs]."""
        return functional.linear(x, self.weight[expert], None if self.bias is None else self.bias[expert])


def experts_by_loop(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: ExpertLinear, down: ExpertLinear, activation: Activation
) -> Tensor:
    """Return the weighted sum over the k experts of each token, [tokens, hidden], in the dtype of `x` [tokens, hidden].

    `ids` and `weights` (float32) are [tokens, k]. Loops over the experts that have tokens, which waits for a device.
    """
    tokens, k = ids.shape
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    rows = order.div(k, rounding_mode="floor")
    counts = flat.bincount(minlength=len(gate_up.weight))
    results = x.new_empty(tokens * k, down.weight.shape[1], dtype=weights.dtype)
    end = 0
    for expert, count in enumerate(counts.tolist()):
        if not count:
            continue
        start, end = end, end + count
        results[order[start:end]] = down.of(expert, activation(gate_up.of(expert, x[rows[start:end]]))).to(
            results.dtype
        )
    first, *others = results.view(tokens, k, -1).mul_(weights.unsqueeze(-1)).unbind(1)
    for other in others:
        first = first + other
    return first.to(x.dtype)
