"""The operands of kernels that are more than tensors, without Triton: CPUs have them too."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from text_generation_shard.engines.torch.kernels.packed_weight import ExpertPanels, MatvecWeight, PackedWeight

T = TypeVar("T")
UNIT_EPS = 1e-6
"""Added to the squared length of queries and keys before they are divided by it."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """act(gate) · up of products [rows, 2 · inner]: [rows, inner].

    Called, it computes in the dtype of its input; the kernels fuse it into the product before it.
    """

    kind: str
    """"silu", "gelu", "gelu_pytorch_tanh", "relu2", which has no gate: max(up, 0)² of products [rows, inner], or "clamped_swiglu": (up + 1) · gate · sigmoid(alpha · gate), of gpt-oss."""
    interleaved: bool = False
    """True: gate and up alternate, gate first. False: all of gate comes first."""
    alpha: float = 1.702
    limit: float = 7.0
    """Clamps up on both sides and gate from above, for "clamped_swiglu" alone."""

    @property
    def has_gate(self) -> bool:
        return self.kind != "relu2"

    def __call__(self, gate_up: Tensor) -> Tensor:
        if not self.has_gate:
            return gate_up.relu().square()
        gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if self.interleaved else gate_up.chunk(2, dim=-1)
        if self.kind != "clamped_swiglu":
            return ACTIVATIONS[self.kind](gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)


@dataclass(frozen=True, slots=True)
class Routing:
    """The choice of the experts of a token from the logits of a router."""

    chosen: int
    """Experts that are chosen for a token."""
    normalize: bool
    """True: the weights of the chosen experts sum to one (`norm_topk_prob`), as in a softmax of the chosen logits."""
    scale: Tensor | None = None
    """[experts]: factors of the weights."""
    choice_bias: Tensor | None = None
    """float32 [experts]: probabilities are sigmoids, and experts are chosen by their sum with it. None: those of a softmax."""
    eps: float = 0.0
    """Added to the sum by which the weights are normalized."""
    groups: tuple[int, int] = (1, 1)
    """Groups that the experts are divided into, and those from which a token's experts are chosen."""
    group_best: int = 1
    """Experts of a group, 1 or 2, whose probabilities are added for the choice of groups."""
    has_shared: bool = False
    """True: the last logit is the gate of an expert shared by all tokens, whose weight is the sigmoid of it."""
    bias: Tensor | None = None
    """[experts]: added to the logits."""

    @property
    def each(self) -> int:
        """Experts of a token."""
        return self.chosen + self.has_shared


@dataclass(frozen=True, slots=True)
class ChosenExperts:
    """The experts of a product with a few rows."""

    ids: Tensor
    """int32 [pairs], contiguous: the expert of each pair of a token and one of its experts."""
    each: int
    """Pairs for each row of x, one after the other."""
    count: int
    """Experts in the weight."""
    known: bool = False
    """True: the kernel before waited for the choice, so that it may be read before that kernel has ended."""


class AdapterStack:
    """The matrices of all LoRA adapters of projections with one input; `parts` has the projection of each output."""

    TILE = 128
    """Most outputs of a tile."""

    def __init__(self, down: Tensor, up: Tensor, parts: Sequence[int]) -> None:
        self.down = down
        """[adapters, projections · rank, inputs]: A of each projection. The inputs of an embedding are the tokens."""
        self.up = up
        """[adapters, outputs, rank]: scale · B. The rank is padded: a power of two from 16 on."""
        self.segments: list[tuple[int, int, int]] = []
        """First output, end, and projection of each run of outputs that are of one projection."""
        for part, run in groupby(parts):
            first = self.segments[-1][1] if self.segments else 0
            self.segments.append((first, first + sum(1 for _ in run), part))
        tiles = [
            (at, min(at + self.TILE, end), part)
            for first, end, part in self.segments
            for at in range(first, end, self.TILE)
        ]
        self.tiles = torch.tensor(tiles, dtype=torch.int32).to(up.device)
        """The same, in tiles of outputs: int32 [tiles, 3]."""

    @property
    def rank(self) -> int:
        return self.up.shape[2]


class PackedExperts(Protocol):
    """A product with one packed weight for each expert."""

    matvec_weight: PackedWeight | None
    """The weights of all experts one after the other, for products with a few rows; None if there are none."""
    panels: ExpertPanels | None
    """The weights for products with tens of rows; None if there are none."""

    def __call__(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Return [rows, outputs] for x [rows, inputs], in order of their experts, and the first row of each, int32 [experts + 1]."""
        ...


@dataclass(slots=True)
class ExpertWeights:
    """The weights of a product with one weight per expert; they may be views with any strides."""

    weight: Tensor
    """[experts, outputs, inputs]."""
    bias: Tensor | None = None
    """[experts, outputs]."""
    packed_product: PackedExperts | None = None
    """If given, `weight` has a shape and no values."""

    @property
    def matvec_weight(self) -> MatvecWeight | None:
        """The weights of all experts one after the other, for products with a few rows; None if they have strides."""
        if self.packed_product is not None:
            return self.packed_product.matvec_weight
        return self.weight.flatten(0, 1) if self.weight.is_contiguous() else None

    @property
    def panels(self) -> ExpertPanels | None:
        """The weights for products with tens of rows; None if there are none."""
        return None if self.packed_product is None else self.packed_product.panels


FEW_PAIRS = 0.25
"""Pairs of a token and an expert, for each expert of a layer, up to which they are computed one by one: measured with bfloat16."""


def fused_arguments(activation: GatedActivation | None, experts: ChosenExperts | None) -> dict[str, object]:
    """Return the arguments of the two kernels of products of a few rows that say what is fused into them."""
    return {
        "alpha": 1.0 if activation is None else activation.alpha,
        "limit": 1.0 if activation is None else activation.limit,
        "KIND": None if activation is None else activation.kind,
        "INTERLEAVED": activation is not None and activation.interleaved,
        "EXPERTS_EACH": 1 if experts is None else experts.each,
        "IDS_KNOWN": experts is None or experts.known,
    }


def few_weights(gate_up: ExpertWeights, down: ExpertWeights, pairs: int) -> tuple[MatvecWeight, MatvecWeight] | None:
    """Return the weights of both products if they are faster than products grouped by expert: docs/quantization.md."""
    if pairs > FEW_PAIRS * len(gate_up.weight):
        return None
    return _both(gate_up.matvec_weight, down.matvec_weight)


PANEL_ROWS = 32
"""Rows of an average expert up to which panels are faster than humming's product: measured with gpt-oss-20b."""


def panel_weights(gate_up: ExpertWeights, down: ExpertWeights, pairs: int) -> tuple[ExpertPanels, ExpertPanels] | None:
    """Return the panels of both products if they are the fastest: docs/quantization.md."""
    return None if pairs > PANEL_ROWS * len(gate_up.weight) else _both(gate_up.panels, down.panels)


def _both(first: T | None, second: T | None) -> tuple[T, T] | None:
    return None if first is None or second is None else (first, second)


@dataclass(frozen=True, slots=True)
class RopeStep:
    """The inputs of the rotation that are the same in all layers of a step."""

    positions: Tensor
    """int32 [tokens]."""
    slots: Tensor
    """int32 [tokens]."""
    block_tables: Tensor
    """int32 [slots, blocks]."""
    table: Tensor
    """float32 [max_positions, 2, head_dim / 2], of `RotaryEmbedding`."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    """Epsilon of the query and key norms."""
    query_beta: float = 0.0
    """Rotated queries are multiplied by 1 + query_beta · ln(1 + ⌊position / query_period⌋)."""
    query_period: int = 1
    norms_values: bool = False
    """True: values are normed too, without a weight."""
    rotary_positions: Tensor | None = None
    """int32 [tokens]: the rows of `table`; None: `positions`."""


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """The inputs of decode attention that are the same in all layers of a step."""

    positions: Tensor
    """int32 [T]: the token attends to keys 0 … position."""
    slots: Tensor
    """int32 [T]: row of the block table."""
    block_tables: Tensor
    """int32 [slots, blocks of the longest sequence]."""
    scale: float
    """Factor of the products of query and key, usually 1 / √head_dim."""
    softcap: float | None = None
    """If given, scores s become softcap · tanh(s / softcap)."""


@dataclass(slots=True, eq=False)
class Convolution:
    """A causal convolution over the tokens of a sequence, each channel by itself.

    The state of a sequence is its last `taps - 1` inputs, followed by those of drafts: pools are [blocks + 1, taps - 1 + drafts,
    channels].
    """

    weight: Tensor
    """[taps, channels]: the last tap is that of the token itself."""
    bias: Tensor | None
    """[channels]."""
    activates: bool
    """True: SiLU follows."""


@dataclass(slots=True, eq=False)
class Recurrence:
    """A linear recurrence of a state S [key_width, value_width] for each head, read by queries.

        S = exp(-decay · s) · S + k · uᵀ,   s = clamp(softplus(step + step_bias)),   o = qᵀS + skip · v

    u = s · v (Mamba 2: Dao and Gu 2024, arXiv 2405.21060), or with `delta` u = beta · (v − kᵀS'), where S' is the decayed state
    and queries and keys have unit length, queries divided by √key_width (gated delta rule: Yang et al. 2024, arXiv 2412.06464).
    `groups` of heads share queries and keys. Pools are [blocks + 1, heads, key_width, value_width]. Pools of drafts keep their inputs,
    [blocks + 1, 2 · drafts + 1, draft_width]: the columns `drafted` of the convolved values, then the steps, then the betas. That of a
    position p has the place p % (2 · drafts + 1): a step adds some while it writes others.
    """

    heads: int
    groups: int
    key_width: int
    value_width: int
    query_start: int
    """First column of the queries of all groups in a row of the convolved values; those of keys and values likewise."""
    key_start: int
    value_start: int
    decay: Tensor
    """float32 [heads], positive."""
    step_bias: Tensor
    """float32 [heads]."""
    skip: Tensor | None
    """float32 [heads]."""
    delta: bool
    beta_scale: float = 1.0
    step_limits: tuple[float, float] = (0.0, math.inf)

    @property
    def drafted(self) -> "slice[int, int, None]":
        """The columns of keys and values."""
        ends = self.key_start + self.groups * self.key_width, self.value_start + self.heads * self.value_width
        return slice(min(self.key_start, self.value_start), max(ends))

    @property
    def draft_width(self) -> int:
        columns = self.drafted
        return columns.stop - columns.start + (1 + self.delta) * self.heads


@dataclass(slots=True, eq=False)
class GatedNorm:
    """RMS norm of each of several groups of columns, times silu(gate)."""

    weight: Tensor | None
    """[columns]; None: values are gated without a norm."""
    eps: float
    width: int
    """Columns of a group."""
    gate_first: bool
    """True: the gate is applied before the norm."""
