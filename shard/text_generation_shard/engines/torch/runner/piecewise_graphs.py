"""Piecewise CUDA graphs, for steps with prompt chunks.

For a step of a few hundred tokens, launching its hundreds of kernels takes longer than computing them. Only attention and the parts
of layers with a state have to be launched: their shapes differ in each step, and FlashInfer plans attention on the host. So a
forward pass is cut there:

    piece 0 · attention of layer 0 · piece 1 · attention of layer 1 · … · last piece

The pieces are graphs, one set per capture size. They depend only on data on the device, and are replayed for any step that fits.
Models that take images are also cut after the embedding and after each of the first layers to which rows of images are added.
A step uses the smallest set that fits; its padding tokens belong to the dummy slot, and are skipped between pieces. Steps above the
largest capture size keep the device busy without graphs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_shard.engines.torch.attention.device_step import DeviceStep, StepContext
from text_generation_shard.engines.torch.attention.step import ScoreRules, StateMix, StepImages
from text_generation_shard.engines.torch.layers.rope import RotaryEmbedding
from text_generation_shard.engines.torch.runner.decode_graphs import GraphPool, Work

CAPTURE_SIZES = (16, 32, 64, *range(128, 1025, 64))
"""Numbers of tokens to capture; a step is padded to the next one."""
PIECES_PER_GRAPH = 16
"""Number of pieces that take as much driver memory as the graph of a whole step."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A computation between two pieces, by its arguments in memory that stays."""

    run: Callable[[DeviceStep, Tensor, Tensor], object]
    """Computes the tokens of a step from inputs [tokens, …] to outputs [tokens, …]."""
    inputs: Tensor
    out: Tensor


class PieceBuffers:
    """Memory of results that pass from one piece to another, for the largest capture size."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, torch.Size, torch.dtype], Tensor] = {}
        self.rotary: dict[RotaryEmbedding, Tensor] = {}
        """A row of factors for each token, if images have rotary positions."""

    def rows(self, name: str, like: Tensor) -> Tensor:
        """Return the first rows of the buffer of a name, in the shape and dtype of `like`."""
        key = name, like.shape[1:], like.dtype
        if key not in self._found:
            # Attention skips the padding rows, so any finite values do; later steps leave theirs.
            self._found[key] = like.new_zeros(CAPTURE_SIZES[-1], *like.shape[1:])
        return self._found[key][: len(like)]

    def keep(self, name: str, values: Tensor) -> Tensor:
        """Return a copy of `values` in the buffer of a name."""
        return self.rows(name, values).copy_(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class CutImages(StepImages):
    """Calls `cut` in the place of each change of the hidden states by images, which each step has of its own."""

    cut: Callable[[Cut], None]
    most_levels: int

    def put(self, hidden: Tensor, level: int, operation: Callable[[Tensor, int, Tensor, Tensor], Tensor]) -> None:
        def run(step: DeviceStep, own: Tensor, _: Tensor) -> None:
            if step.images is not None:
                step.images.put(own, level, operation)

        if level < self.most_levels:
            self.cut(Cut(run, hidden, hidden))


class CutStep(DeviceStep):
    """A step that calls `cut` with each attention and each part with a state, and leaves the memory of its result as it is."""

    def __init__(
        self,
        columns: Tensor,
        context: StepContext,
        buffers: PieceBuffers,
        cut: Callable[[Cut], None],
        *,
        image_levels: int = 0,
        adapted: bool = False,
    ) -> None:
        super().__init__(columns, columns.shape[1], context, adapted=adapted)
        self._buffers = buffers
        self._cut = cut
        if image_levels:
            self.images = CutImages(None, None, None, cut=cut, most_levels=image_levels)
        if context.slot_shifts is not None:
            self._rotary_positions = torch.arange(self.num_tokens, dtype=torch.int32, device=columns.device)

    def _rotary_table(self, rotary: RotaryEmbedding) -> Tensor:
        if self._context.slot_shifts is None:
            return rotary.table
        if rotary not in self._buffers.rotary:
            self._buffers.rotary[rotary] = rotary.table.new_zeros(CAPTURE_SIZES[-1], *rotary.table.shape[1:])
        return self._buffers.rotary[rotary]

    def attend(self, layer: int, queries: Tensor, rules: ScoreRules, out: Tensor | None = None) -> Tensor:
        if out is None:
            # The caller has no buffers.
            like = queries.new_empty(len(queries), queries.shape[1] * self._context.layers[layer].value_dim)
            queries, out = self._buffers.keep("queries", queries), self._buffers.rows("attended", like)
        self._cut(Cut(lambda step, own, result: step.attend(layer, own, rules, result), queries, out))
        return out

    def with_states(self, mix: StateMix, projected: Tensor, out: Tensor | None = None) -> Tensor:
        assert out is not None
        self._cut(Cut(lambda step, own, result: step.with_states(mix, own, result), projected, out))
        return out


@dataclass(frozen=True, slots=True)
class _CapturedPass:
    pieces: list[Work]
    cuts: list[Cut]
    """The computations between the pieces, padded to the capture size."""
    normed: Tensor
    carried: Tensor | None


class PiecewiseGraphs:
    """Sets of captured pieces that share memory, of a `forward` as `Model.cut_forward` returns it. Used in inference mode."""

    def __init__(
        self, forward: Callable[[DeviceStep], Tensor], context: StepContext, dummy_slot: int, image_levels: int
    ) -> None:
        """`image_levels`: levels of the rows of an image; 0 if steps with images have no graphs."""
        self._forward = forward
        self._context = context
        self._image_levels = image_levels
        self._padding = torch.tensor(
            [[0], [0], [dummy_slot], [0]], dtype=torch.int32, device=context.last_tokens.device
        )
        """A padding token: see `DeviceStep`."""
        self._columns = self._padding.repeat(1, CAPTURE_SIZES[-1])
        self._buffers = PieceBuffers()
        self._captured: dict[tuple[int, bool], _CapturedPass] = {}
        """By size, and True for steps with LoRA adapters."""

    def capture(self, size: int, recorder: GraphPool, *, adapted: bool = False) -> None:
        """Capture the pieces of one of CAPTURE_SIZES."""
        columns = self._columns[:, :size]
        # Run once before the capture: this compiles kernels, creates handles and allocates memory outside the pool.
        self._run(columns, lambda _: None, adapted=adapted)
        pieces: list[Work] = []
        cuts: list[Cut] = []

        def cut(each: Cut) -> None:
            pieces.append(recorder.end())
            cuts.append(each)
            recorder.begin()

        recorder.begin()
        try:
            normed, carried = self._run(columns, cut, adapted=adapted)
        finally:
            pieces.append(recorder.end())
        self._captured[size, adapted] = _CapturedPass(pieces, cuts, normed, carried)

    def run(self, step: DeviceStep) -> Tensor | None:
        """Return the same as the model's `forward`, valid until the next step; None if no capture size fits."""
        tokens = step.num_tokens
        size = capture_size_for(tokens)
        captured = self._captured.get((size, step.adapters is not None))
        if captured is None or (step.images is not None and step.images.levels > self._image_levels):
            return None
        for rotary, rows in self._buffers.rotary.items():
            rows[:tokens].copy_(step.rotary_rows(rotary))
        self._columns[:, :tokens].copy_(step.columns)
        if tokens < size:
            self._columns[:, tokens:size].copy_(self._padding)
        views: dict[tuple[int, torch.Size], Tensor] = {}
        for index, piece in enumerate(captured.pieces):
            if index:
                cut = captured.cuts[index - 1]
                # The same objects for the same memory: a step divides them once.
                inputs, out = (
                    views.setdefault((each.data_ptr(), each.shape), each[:tokens]) for each in (cut.inputs, cut.out)
                )
                cut.run(step, inputs, out)
            piece()
        step.carried = None if captured.carried is None else captured.carried[:tokens]
        return captured.normed[:tokens]

    def __len__(self) -> int:
        """Memory weight of all sets, in whole-step graphs."""
        pieces = max(len(captured.pieces) for captured in self._captured.values())
        return len(CAPTURE_SIZES) * -(-pieces // PIECES_PER_GRAPH)

    def _run(self, columns: Tensor, cut: Callable[[Cut], None], *, adapted: bool) -> tuple[Tensor, Tensor | None]:
        levels = self._image_levels
        step = CutStep(columns, self._context, self._buffers, cut, image_levels=levels, adapted=adapted)
        normed = self._buffers.keep("normed", self._forward(step))
        return normed, None if step.carried is None else self._buffers.keep("carried", step.carried)


def capture_size_for(tokens: int) -> int:
    """Return the smallest capture size ≥ `tokens`; `tokens` itself, which is not a capture size, if there is none."""
    return next((size for size in CAPTURE_SIZES if tokens <= size), tokens)
