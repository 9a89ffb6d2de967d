"""Runs parts of a model of transformers alone, on random input: to learn their inputs, and to compare them with our own."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, functional

from text_generation_shard.engines.torch.attention.cpu_step import PlainStep
from text_generation_shard.engines.torch.attention.step import ScoreRules
from text_generation_shard.engines.torch.batch.kv_cache import LayerShape
from text_generation_shard.engines.torch.kernels.operands import ACTIVATIONS
from text_generation_shard.engines.torch.layers.norm import RMSNorm
from text_generation_shard.engines.torch.layers.rope import NO_ROPE, Rope, RotaryEmbedding, head_order
from text_generation_shard.engines.torch.models.huggingface.library import LibraryModule, changed

TABLE_CHUNK = 4096
"""Positions whose rotations are computed at once."""
EPS_NAMES = ("variance_epsilon", "eps")
"""Names of the attribute of a norm."""
MOST_DIFFERENCE = {torch.float32: 1e-5}
MOST_DIFFERENCE_OF_16_BITS = 1e-2
"""Largest relative errors between two results of one part of a model. Those of a whole model are in check.py."""


class UnusualError(Exception):
    """A part of a model has no form that is known here. The message says which."""


def is_same(result: Tensor, expected: Tensor) -> bool:
    """Return True if two results differ by rounding only."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return False
    most = MOST_DIFFERENCE.get(result.dtype, MOST_DIFFERENCE_OF_16_BITS)
    result, expected = result.float(), expected.float()
    return bool((result - expected).norm() <= most * expected.norm())


def random_like(like: Tensor, *shape: int) -> Tensor:
    """Return the same random numbers each time, on the device and in the dtype of `like`."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(like)


def norm_of(module: LibraryModule) -> RMSNorm | None:
    """Return our RMS norm with the weight of `module` if that is one without a bias; else None."""
    weight = getattr(module, "weight", None)
    eps = next((getattr(module, name) for name in EPS_NAMES if hasattr(module, name)), None)
    if not isinstance(weight, Tensor) or weight.ndim != 1 or not isinstance(eps, float):
        return None
    if len(list(module.parameters())) > 1 or any(True for _ in module.children()):
        return None
    # In float32, with a weight that is not one, and with values so small that eps counts.
    probe = copy.deepcopy(module).float()
    probe.weight.data = random_like(probe.weight, *weight.shape)
    x = random_like(probe.weight, 3, *weight.shape) * 0.01
    try:
        expected = probe(x)
    except (TypeError, ValueError, RuntimeError):  # it takes more than hidden states
        return None
    for is_centred in (False, True):
        if is_same(functional.rms_norm(x, weight.shape, probe.weight + float(is_centred), eps), expected):
            norm = RMSNorm(len(weight), eps, weight.device, weight.dtype, zero_centered=is_centred)
            norm.weight = weight.data
            norm.process_weights_after_loading()
            return norm
    return None


def activation_of(mlp: LibraryModule) -> str | None:
    """Return the activation of an MLP that computes down(act(gate) · up); None for other MLPs."""
    names = ("gate_up_proj",) if hasattr(mlp, "gate_up_proj") else ("gate_proj", "up_proj")
    if any(type(getattr(mlp, name, None)) is not Linear for name in (*names, "down_proj")):
        return None
    probe = copy.deepcopy(mlp).float()
    x = random_like(probe.down_proj.weight, 1, 3, getattr(probe, names[0]).in_features)
    # So large that activations differ.
    x /= getattr(probe, names[0])(x).std() + 1e-6
    gate, up = torch.cat([getattr(probe, name)(x) for name in names], dim=-1).chunk(2, dim=-1)
    try:
        expected = probe(x)
    except (TypeError, ValueError, RuntimeError):  # it takes more than hidden states
        return None
    kinds = (kind for kind, act in ACTIVATIONS.items() if is_same(probe.down_proj(act(gate) * up), expected))
    return next(kinds, None)


@dataclass(frozen=True, slots=True)
class LayerInput:
    """The arguments that a model gives to one of its layers."""

    hidden: Tensor
    """[1, tokens, hidden]."""
    arguments: tuple[Any, ...]
    named: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BaseRun:
    """A pass through a base model whose layers return their input."""

    inputs: list[LayerInput]
    last_norm: Module
    """The part of the base model that ran last, after all layers."""
    output: Tensor


def run_without_layers(base: Module, layers: Sequence[Module], positions: Tensor, **inputs: Tensor) -> BaseRun:
    """Run the base model alone."""
    recorded: list[LayerInput] = []

    def pass_on(hidden_states: Tensor, *arguments: Any, **named: Any) -> Tensor:  # noqa: ANN401 – a module's forward
        recorded.append(LayerInput(hidden_states, arguments, named))
        return hidden_states

    ran: list[Module] = []
    hooks = [child.register_forward_hook(lambda child, *_: ran.append(child)) for child in base.children()]
    with changed([(layer, "forward") for layer in layers], pass_on):
        output = base(position_ids=positions.unsqueeze(0), use_cache=False, **inputs).last_hidden_state
    for hook in hooks:
        hook.remove()
    if len(recorded) != len(layers) or not ran:
        raise UnusualError("layers do not run once each")
    return BaseRun(recorded, ran[-1], output)


@dataclass(frozen=True, slots=True)
class Rotation:
    rotary: RotaryEmbedding
    order: list[int] | None
    """The dimension of the library's head at each of ours: see `head_order`."""


def layer_rotations(
    base: Module, layers: Sequence[Module], head_dim: int, max_positions: int, like: Tensor
) -> list[list[Rotation]]:
    """Return the rotations that each layer may have, by the factors that the base model gives to it."""
    device = like.device
    tables: dict[int, list[Tensor]] = {}
    partial: dict[int, float] = {}
    owners: list[int | None] = []
    for start in range(0, max_positions, TABLE_CHUNK):
        positions = torch.arange(start, min(start + TABLE_CHUNK, max_positions), device=device)
        hidden = torch.zeros(1, len(positions), like.shape[1], device=device)
        inputs = run_without_layers(base, layers, positions, inputs_embeds=hidden).inputs
        factors = [given.named.get("position_embeddings") for given in inputs]
        addresses = [None if pair is None else pair[0].data_ptr() for pair in factors]
        owners = [None if address is None else addresses.index(address) for address in addresses]
        for layer, pair in enumerate(factors):
            if pair is not None and owners[layer] == layer:
                cos, sin = (_pairs(each[0], head_dim).float() for each in pair)
                unused = head_dim // 2 - cos.shape[1]
                padded = functional.pad(cos, (0, unused), value=1.0), functional.pad(sin, (0, unused))
                tables.setdefault(layer, []).append(torch.stack(padded, dim=1))
                partial[layer] = 2 * cos.shape[1] / head_dim
    none = RotaryEmbedding(NO_ROPE, head_dim, device)
    none.fill_table(max_positions)
    found: dict[int | None, list[Rotation]] = {None: [Rotation(none, None)]}
    for layer, chunks in tables.items():
        rotary = RotaryEmbedding(NO_ROPE, head_dim, device)
        rotary.table = torch.cat(chunks)
        ropes = [Rope("default", 2.0, partial=partial[layer], interleaved=each) for each in (False, True)]
        found[layer] = [*(Rotation(rotary, head_order(rope, head_dim)) for rope in ropes), Rotation(none, None)]
    return [found[owner] for owner in owners]


def _pairs(factors: Tensor, head_dim: int) -> Tensor:
    """Return the factors [positions, pairs] of factors [positions, rotated dimensions], or of such that are by pair."""
    half = factors.shape[1] // 2
    if torch.equal(factors[:, :half], factors[:, half:]):
        return factors[:, :half]
    if torch.equal(factors[:, ::2], factors[:, 1::2]):
        return factors[:, ::2]
    if 2 * factors.shape[1] <= head_dim:
        return factors
    raise UnusualError("a rotation has no pairs")


class LoneTokens(PlainStep):
    """Tokens of different sequences at any positions. Each attends to all, and weights are not normalized."""

    def __init__(self, positions: Tensor, shape: LayerShape) -> None:
        super().__init__(positions, [shape])
        self._shape = shape
        self.residual = self._keys = self._values = torch.empty(0)
        """The residual stream of the pass."""

    def token_ids(self) -> Tensor:
        return torch.arange(self.num_tokens, device=self.positions.device)

    def embed(self, table: Tensor, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
        """Return the rows of `table`, one for each token."""
        self.residual = table.clone()
        return self.residual

    def attend(self, layer: int, queries: Tensor, rules: ScoreRules, out: Tensor | None = None) -> Tensor:
        weights = torch.einsum("thd,shd->hts", queries, self._keys) * rules.scale + (rules.softcap or 0.0)
        if rules.sinks is not None:
            weights = weights + rules.sinks.view(-1, 1, 1)
        return torch.einsum("hts,shd->thd", weights, self._values).flatten(1)

    def _write(self, layer: int, keys_values: Tensor) -> None:
        share = self._shape.num_heads // self._shape.num_kv_heads
        self._keys, self._values = keys_values.repeat_interleave(share, dim=1).chunk(2, dim=1)
