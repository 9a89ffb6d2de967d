"""Faster code for parts of a model of transformers on a GPU: fewer kernels for the same results.

A part is replaced only if it gives the same results on random input: RMS norms, the rotation of queries and keys, projections
with the same input, gated MLPs, and the LM head, which then gives float32. The names of modules only say where to look.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import structlog
import torch
from torch import Tensor
from torch.nn import Linear, Module, functional

from text_generation_shard.engines.torch.huggingface.library import LibraryModel
from text_generation_shard.engines.torch.kernels.activation import activate
from text_generation_shard.engines.torch.kernels.matvec import matvec
from text_generation_shard.engines.torch.kernels.rotate import rotate
from text_generation_shard.engines.torch.model.linear import float32_product

FUSED_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
ROTATION = "apply_rotary_pos_emb"
"""Name of the function of a modeling file that rotates queries and keys."""
EPS_NAMES = ("variance_epsilon", "eps")
ACTIVATION_NAMES = ("hidden_activation", "hidden_act")
ACTIVATION_KINDS = ("silu", "gelu", "gelu_pytorch_tanh")
MOST_DIFFERENCE = {torch.float32: 1e-5}
MOST_DIFFERENCE_OF_16_BITS = 1e-2

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
    log.info(
        "parts replaced",
        norms=sum(_swap_norm(module) for module in modules),
        rotation=swap_rotation(sys.modules[type(model).__module__]),
        fused=sum(_fuse_projections(module) for module in modules),
        mlps=sum(_swap_mlp(module) for module in modules),
        linears=sum(_swap_linear(module) for module in modules),
    )


def _is_same(result: Tensor, expected: Tensor) -> bool:
    """Return True if two results differ by rounding only."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return False
    most = MOST_DIFFERENCE.get(result.dtype, MOST_DIFFERENCE_OF_16_BITS)
    result, expected = result.float(), expected.float()
    return bool((result - expected).norm() <= most * expected.norm())


def _random(*shape: int, like: Tensor) -> Tensor:
    """Return the same random numbers each time, on the device and in the dtype of `like`."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(like)


def _swap_norm(module: Any) -> bool:  # noqa: ANN401 – a module of the library
    """Compute a norm without a bias in one kernel; with a zero-centred weight, in float32."""
    weight, eps = (
        getattr(module, "weight", None),
        next((getattr(module, n) for n in EPS_NAMES if hasattr(module, n)), 0),
    )
    if not isinstance(weight, Tensor) or weight.ndim != 1 or not isinstance(eps, float):
        return False
    if len(list(module.parameters())) > 1 or any(True for _ in module.children()):
        return False
    # In float32, with a weight that is not one, and with values so small that eps counts.
    probe = copy.deepcopy(module).float()
    probe.weight.data = _random(*weight.shape, like=probe.weight)
    x = _random(3, *weight.shape, like=probe.weight) * 0.01
    try:
        expected = probe(x)
    except (TypeError, ValueError, RuntimeError):  # it takes more than hidden states
        return False
    if _is_same(functional.rms_norm(x, weight.shape, probe.weight, eps), expected):
        module.forward = _plain_norm(weight, eps, module.forward)
        return True
    if _is_same(functional.rms_norm(x, weight.shape, 1.0 + probe.weight, eps), expected):
        module.forward = _centred_norm(1.0 + weight.float(), eps)
        return True
    return False


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
    queries, keys = _random(1, 3, 5, 16, like=torch.empty(0)), _random(1, 2, 5, 16, like=torch.empty(0))
    cos, sin = (factors.repeat(1, 1, 2) for factors in _random(2, 1, 5, 8, like=torch.empty(0)))
    try:
        results = original(queries, keys, cos, sin)
    except (TypeError, ValueError, RuntimeError):
        return False
    if not all(_is_same(result, _rotated(x, cos, sin)) for result, x in zip(results, (queries, keys), strict=True)):
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


def _swap_mlp(module: Any) -> bool:  # noqa: ANN401 – a module of the library
    """Compute act(gate) · up of a gated MLP in one kernel, on its fused projections."""
    gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    config = getattr(module, "config", None)
    kind = next((getattr(config, name) for name in ACTIVATION_NAMES if hasattr(config, name)), "silu")
    if kind not in ACTIVATION_KINDS or not (type(gate) is type(up) is type(down) is Linear):
        return False
    weight = _adjacent(gate.weight, up.weight)
    if weight is None or gate.bias is not None or up.bias is not None:
        return False
    down_weight, down_bias = down.weight, down.bias

    def forward(x: Tensor) -> Tensor:
        gate_up = _product(x, weight, None).view(-1, weight.shape[0])
        inner = gate_up.new_empty(*x.shape[:-1], weight.shape[0] // 2)
        activate(gate_up, kind, inner.view(-1, inner.shape[-1]))
        return _product(inner, down_weight, down_bias)

    x = _random(1, 2, weight.shape[1], like=weight)
    try:
        is_same = _is_same(forward(x), module(x))
    except (TypeError, ValueError, RuntimeError):
        return False
    if is_same:
        module.forward = forward
    return is_same


def _adjacent(first: Tensor, second: Tensor) -> Tensor | None:
    """Return both weights as one tensor if they are rows of one; else None."""
    if first.shape != second.shape or second.data_ptr() != first.data_ptr() + first.nbytes:
        return None
    return first.as_strided((2 * first.shape[0], first.shape[1]), first.stride())


def _swap_linear(module: Any) -> bool:  # noqa: ANN401 – a module of the library
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
