"""A mixture of experts in plain torch: the choice of the experts of each token, and the grouped product with its operands.

Every token has k experts. For each of these pairs, out = weight · down(act(gate(x)) · up(x)); the results of a token's k experts
are added in the order of its ids, so that the sum does not depend on the other tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from text_generation_shard.engines.torch.kernels.operands import ExpertWeights, GatedActivation, Routing
from text_generation_shard.engines.torch.layers.linear import DenseLinear


@dataclass(slots=True)
class ExpertLinear(ExpertWeights):
    """A product with one weight per expert."""

    packed: tuple[DenseLinear, ...] = ()
    """After `pack`: the products of the experts, which hold the weights."""

    def pack(self) -> None:
        """Reorder the weights for products on a CPU; `weight` can be used for nothing else: see `Linear.pack`."""
        biases = [None] * len(self.weight) if self.bias is None else self.bias.unbind()
        packed = []
        for weight, bias in zip(self.weight.unbind(), biases, strict=True):
            packed.append(DenseLinear(weight, bias, weight.dtype))
            packed[-1].pack()
        self.packed = tuple(packed)
        self.weight = self.weight.new_empty(0).expand(len(packed), *self.weight.shape[1:-1], 0)

    def of(self, expert: int, x: Tensor) -> Tensor:
        """Return the product of one expert with `x` [rows, inputs]."""
        if self.packed:
            return self.packed[expert](x)
        return functional.linear(x, self.weight[expert], None if self.bias is None else self.bias[expert])


def experts_by_loop(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: ExpertLinear, down: ExpertLinear, activation: GatedActivation
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


Routed = tuple[Tensor, Tensor]
"""The ids [tokens, k] and the weights, float32 [tokens, k], of the chosen experts."""


def choose_top_k(logits: Tensor, routing: Routing) -> Routed:
    """Choose by probability over all experts, from `logits` [tokens, experts]; computed in float32."""
    gates = logits[:, -1:].float().sigmoid()
    if routing.has_shared:
        logits = logits[:, :-1]
    if routing.bias is not None:
        logits = logits + routing.bias
    if routing.choice_bias is None:
        scores = probabilities = logits.softmax(-1, dtype=torch.float32)
    else:
        probabilities = logits.float().sigmoid()
        scores = probabilities + routing.choice_bias
    groups, kept = routing.groups
    if kept < groups:
        grouped = scores.view(len(scores), groups, -1)
        totals = grouped.topk(routing.group_best, dim=-1).values.sum(-1)
        is_left = torch.ones_like(totals, dtype=torch.bool).scatter_(1, totals.topk(kept, dim=-1).indices, value=False)
        scores = grouped.masked_fill(is_left.unsqueeze(2), -torch.inf).flatten(1)
    ids = scores.topk(routing.chosen, dim=-1).indices
    weights = probabilities.gather(-1, ids)
    if routing.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.eps)
    if routing.scale is not None:
        weights = weights * routing.scale.float()[ids]
    if routing.has_shared:
        ids, weights = functional.pad(ids, (0, 1), value=logits.shape[1]), torch.cat((weights, gates), 1)
    return ids, weights
