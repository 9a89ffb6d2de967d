"""Attention of Hugging Face modules over our cache, through transformers' attention interface.

transformers makes no mask for an attention function that it does not know, so a flat batch of several sequences can pass
through a model as one sequence: everything but attention works token by token. The attention calls of a forward pass come in
the same order each time; the number of a call is the number of its layer in the cache. A first pass records their shapes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, arange, ones
from torch.nn import Module, functional

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.attention.step import ScoreRules, Step
from text_generation_shard.engines.torch.batch.kv_cache import LayerShape

NAME = "paged_cache"
"""Name of our attention function in transformers."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """A call of attention in a forward pass."""

    layer: int
    """The number of its layer in the cache: a new one, or that of an earlier call with the same keys and values."""
    is_first: bool
    """True if no earlier call has the same keys and values."""


Limits: TypeAlias = tuple[int | None, int | None]
"""Sliding window and chunk length of a layer: see `LayerShape`."""


_handlers: "list[AttentionRecorder | StepAttention]" = []
"""The handler of the forward pass in progress comes last."""


@contextmanager
def handled_by(handler: "AttentionRecorder | StepAttention") -> Iterator[None]:
    """Let `handler` compute the attention of modules."""
    _handlers.append(handler)
    try:
        yield
    finally:
        _handlers.pop()


def paged_attention(  # noqa: PLR0913 – the signature is that of transformers' attention functions
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Return the attention of a flat batch, [1, tokens, heads, value dim], as transformers calls it."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rules, limits = ScoreRules(scale, softcap, s_aux), (sliding_window or None, _chunk(module))
    handler = _handlers[-1]
    if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
        factors = handler.position_factors(float(module.floor_scale), float(module.attn_scale))  # type: ignore[arg-type]
        query = query * factors.to(query).view(1, 1, -1, 1)
    return handler.attend(query[0], key[0], value[0], rules, limits).unsqueeze(0), None


def _chunk(module: Module) -> int | None:
    """Return the length of the chunks that the tokens of a layer attend to: only its config and its mask have it."""
    config: Any = getattr(module, "config", None)
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds is None or index is None or index >= len(kinds) or kinds[index] != "chunked_attention":
        return None
    return int(config.attention_chunk_size)


class AttentionRecorder:
    """Records the attention calls of a pass and the shapes of the layers of their cache; computes nothing.

    Heads are widened to the next of `head_dims`, for which kernels are fastest; wider ones are left as they are.
    """

    def __init__(self, head_dims: Sequence[int] = ()) -> None:
        self.calls: list[AttentionCall] = []
        self.layers: list[LayerShape] = []
        self.rules: list[tuple[float, float | None]] = []
        """Scale and softcap of each layer of the cache."""
        self._head_dims = head_dims
        self._cached: list[tuple[LayerShape, Tensor, Tensor]] = []

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, rules: ScoreRules, limits: Limits) -> Tensor:
        heads, kv_heads = queries.shape[0], keys.shape[0]
        if heads % kv_heads or values.shape[0] != kv_heads or keys.shape[2] != queries.shape[2]:
            raise EngineError(f"attention of {heads} heads over {kv_heads} heads of keys is not served")
        width = max(keys.shape[2], values.shape[2])
        served = min((each for each in self._head_dims if each >= width), default=width)
        shape = LayerShape(heads, kv_heads, served, *limits)
        for index, (other, other_keys, other_values) in enumerate(self._cached):
            if shape == other and _is_same(keys, other_keys) and _is_same(values, other_values):
                self.calls.append(AttentionCall(index, is_first=False))
                break
        else:
            self.calls.append(AttentionCall(len(self.layers), is_first=True))
            self.layers.append(shape)
            self.rules.append((rules.scale, rules.softcap))
            self._cached.append((shape, keys, values))
        return values.new_zeros(queries.shape[1], heads, values.shape[2])

    def position_factors(self, period: float, strength: float) -> Tensor:
        return ones(1)


class StepAttention:
    """Computes the attention calls of a pass over the tokens of a step."""

    def __init__(self, step: Step, calls: list[AttentionCall], layers: list[LayerShape]) -> None:
        self._step = step
        self._calls = iter(calls)
        self._layers = layers

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, rules: ScoreRules, limits: Limits) -> Tensor:
        """Return attention [tokens, heads, value dim] of `queries`, `keys` and `values` [heads, tokens, dim]."""
        call = next(self._calls)
        head_dim = self._layers[call.layer].head_dim
        if call.is_first:
            self._step.append(call.layer, keys.to(values.dtype), values)
        own = _widened(queries, head_dim).transpose(0, 1).to(values.dtype)
        attended = self._step.attend(call.layer, own, rules)
        return attended.view(own.shape)[..., : values.shape[2]].to(queries.dtype)

    def position_factors(self, period: float, strength: float) -> Tensor:
        """Return a factor for each token: scaled_by_position(own position) / scaled_by_position(place in the batch).

        Llama 4 computes the scale of its queries from the place, as if the batch were one sequence.
        """
        positions = self._step.positions
        places = arange(len(positions), device=positions.device)
        return _scales(positions, period, strength) / _scales(places, period, strength)


def _scales(positions: Tensor, period: float, strength: float) -> Tensor:
    """Return the scales of queries (Nakanishi 2025, arXiv 2501.19399), which grow with the logarithm of the position."""
    return ((positions.float() + 1.0) / period).floor().log1p() * strength + 1.0


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """Return True for two views of the same memory. A tensor on the meta device has a storage and no address."""
    return (
        tensor.untyped_storage() is other.untyped_storage()
        and tensor.storage_offset() == other.storage_offset()
        and tensor.stride() == other.stride()
        and tensor.shape == other.shape
    )


def _widened(heads: Tensor, head_dim: int) -> Tensor:
    """Return `heads` [heads, tokens, dim] with zeros up to the cache's head_dim: they change no product."""
    width = heads.shape[2]
    return heads if width == head_dim else functional.pad(heads, (0, head_dim - width))
