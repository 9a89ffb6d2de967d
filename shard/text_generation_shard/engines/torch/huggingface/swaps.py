"""Faster code for parts of a model of transformers on a GPU: fewer kernels for the same results.

A part is replaced only if it gives the same results on random input: RMS norms, the rotation of queries and keys, projections
with the same input, gated MLPs, and the LM head, which then gives float32. The names of modules only say where to look.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import structlog
import torch
from torch import Tensor
from torch.nn import Linear, Module, functional

from text_generation_shard.engines.torch.huggingface.library import LibraryModel, LibraryModule
from text_generation_shard.engines.torch.huggingface.probe import activation_of, is_same, norm_of, random_like
from text_generation_shard.engines.torch.kernels.activation import activate
from text_generation_shard.engines.torch.kernels.matvec import matvec
from text_generation_shard.engines.torch.kernels.rotate import rotate
from text_generation_shard.engines.torch.model.linear import float32_product

FUSED_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
ROTATION = "apply_rotary_pos_emb"
"""Name of the function of a modeling file that rotates queries and keys."""

log = structlog.get_logger()


def restorer(model: LibraryModel) -> Callable[[], None]:
    """Return a function that puts the parts of `model` back that `swap_parts` replaces after this call."""
    modules, file = list(model.modules()), sys.modules[type(model).__module__]
    changed = {id(module) for module in modules if "forward" in vars(module)}
    rotation = getattr(file, ROTATION, None)

    def restore() -> None:
        for module in modules:
            if id(module) not in changed:
                vars(module).pop("forward", None)
        if rotation is not None:
            setattr(file, ROTATION, rotation)

    return restore


@torch.inference_mode()
def swap_parts(model: LibraryModel) -> None:
    """Replace what can be replaced in `model`, which is on a GPU."""
    modules = list(model.modules())
    head = model.get_output_embeddings()
    if type(head) is Linear and head.bias is None:
        vars(head)["forward"] = _head(head.weight)
    # Before the products are fused: an activation is found with a float32 copy of the MLP.
    activations = {module: kind for module in modules if (kind := activation_of(module)) is not None}
    log.info(
        "parts replaced",
        norms=sum(_swap_norm(module) for module in modules),
        rotation=swap_rotation(sys.modules[type(model).__module__]),
        fused=sum(_fuse_projections(module) for module in modules),
        mlps=sum(_swap_mlp(module, kind) for module, kind in activations.items()),
        linears=sum(_swap_linear(module) for module in modules),
    )


def _swap_norm(module: LibraryModule) -> bool:
    """Compute a norm without a bias in one kernel; with a zero-centred weight, in float32."""
    norm = norm_of(module)
    if norm is None:
        return False
    if norm.weight.dtype == module.weight.dtype:
        module.forward = _plain_norm(norm.weight, norm.eps, module.forward)
    else:
        module.forward = _centred_norm(norm.weight, norm.eps)
    return True


def _plain_norm(weight: Tensor, eps: float, own: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def forward(hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != weight.dtype:
            return own(hidden_states)
        return functional.rms_norm(hidden_states, weight.shape, weight, eps)

    return forward


def _centred_norm(weight: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
    def forward(hidden_states: Tensor) -> Tensor:
        return functional.rms_norm(hidden_states.float(), weight.shape, weight, eps).to(hidden_states.dtype)

    return forward


def swap_rotation(file: Any) -> bool:  # noqa: ANN401 – a module of Python
    """Replace the rotation of a modeling file by one kernel, where the whole heads of one sequence are rotated."""
    original = getattr(file, ROTATION, None)
    if original is None:
        return False
    queries, keys = random_like(torch.empty(0), 1, 3, 5, 16), random_like(torch.empty(0), 1, 2, 5, 16)
    cos, sin = (factors.repeat(1, 1, 2) for factors in random_like(torch.empty(0), 2, 1, 5, 8))
    try:
        results = original(queries, keys, cos, sin)
    except (TypeError, ValueError, RuntimeError):
        return False
    if not all(is_same(result, _rotated(x, cos, sin)) for result, x in zip(results, (queries, keys), strict=True)):
        return False

    def rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        is_flat = q.ndim == 4 and len(q) == 1 and cos.shape == (1, q.shape[2], q.shape[3]) == sin.shape
        if rest or named or not is_flat or k.shape[3] != q.shape[3]:
            result: tuple[Tensor, Tensor] = original(q, k, cos, sin, *rest, **named)
            return result
        rotated_queries, rotated_keys = rotate(q[0], k[0], cos[0].contiguous(), sin[0].contiguous())
        return rotated_queries.unsqueeze(0), rotated_keys.unsqueeze(0)

    setattr(file, ROTATION, rotation)
    return True


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class _FusedProjections:
    """Several linear layers with one input, as one product: the first call computes it, the others return their part."""

    def __init__(self, linears: Sequence[Any]) -> None:
        self.sizes = [linear.out_features for linear in linears]
        self.weight = torch.cat([linear.weight for linear in linears])
        self.bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
        self._input: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()
        rows = torch.split(self.weight, self.sizes)
        for index, (linear, part) in enumerate(zip(linears, rows, strict=True)):
            # The rows of the fused weight take the place of the layer's own.
            linear.weight.data = part
            linear.forward = self._forward(index, linear.forward)

    def _forward(self, index: int, own: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            if index == 0:
                self._input, self._parts = x, torch.split(_product(x, self.weight, self.bias), self.sizes, dim=-1)
            elif x is not self._input:
                return own(x)
            part = self._parts[index]
            if index == len(self.sizes) - 1:
                self._input, self._parts = None, ()
            return part

        return forward


def _fuse_projections(module: Module) -> int:
    """Fuse the projections of an attention or MLP module; return the number of products that are left."""
    groups = 0
    for names in FUSED_PROJECTIONS:
        linears = [getattr(module, name, None) for name in names]
        if all(type(linear) is Linear for linear in linears) and len({_kind(linear) for linear in linears}) == 1:
            _FusedProjections(linears)
            groups += 1
    return groups


def _kind(linear: Any) -> tuple[object, ...]:  # noqa: ANN401 – a Linear
    return linear.in_features, linear.bias is None, linear.weight.dtype


def _swap_mlp(module: LibraryModule, kind: str) -> bool:
    """Compute act(gate) · up of a gated MLP in one kernel, on its fused projections."""
    if hasattr(module, "gate_up_proj") or module.gate_proj.bias is not None or module.up_proj.bias is not None:
        return False
    down = module.down_proj
    weight = _adjacent(module.gate_proj.weight, module.up_proj.weight)
    if weight is None:
        return False
    down_weight, down_bias = down.weight, down.bias

    def forward(x: Tensor) -> Tensor:
        gate_up = _product(x, weight, None).view(-1, weight.shape[0])
        inner = gate_up.new_empty(*x.shape[:-1], weight.shape[0] // 2)
        activate(gate_up, kind, inner.view(-1, inner.shape[-1]))
        return _product(inner, down_weight, down_bias)

    module.forward = forward
    return True


def _adjacent(first: Tensor, second: Tensor) -> Tensor | None:
    """Return both weights as one tensor if they are rows of one; else None."""
    if first.shape != second.shape or second.data_ptr() != first.data_ptr() + first.nbytes:
        return None
    return first.as_strided((2 * first.shape[0], first.shape[1]), first.stride())


def _swap_linear(module: LibraryModule) -> bool:
    """Use our product for a single token in a linear layer that no other swap has changed."""
    if type(module) is not Linear or "forward" in vars(module):
        return False
    weight, bias = module.weight, module.bias

    def forward(x: Tensor) -> Tensor:
        return _product(x, weight, bias)

    vars(module)["forward"] = forward
    return True


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x · weightᵀ + bias; for a single token by our own kernel."""
    if x.numel() != weight.shape[1]:
        return functional.linear(x, weight, bias)
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    matvec(x.reshape(1, -1), weight, out.view(1, -1), bias)
    return out


def _head(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Return an LM head with float32 logits: rounded to 16 bits, the most probable tokens are often equal."""

    def forward(x: Tensor) -> Tensor:
        rows = x.reshape(-1, weight.shape[1])
        if len(rows) == 1:
            logits = torch.empty(1, weight.shape[0], dtype=torch.float32, device=x.device)
            matvec(rows, weight, logits)
        else:
            logits = float32_product(rows, weight, None)
        return logits.view(*x.shape[:-1], weight.shape[0])

    return forward
