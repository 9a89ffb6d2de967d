"""Piecewise CUDA graphs, for steps with prompt chunks: see `model/decoder.py`.

For a step of a few hundred tokens, launching its hundreds of kernels takes longer than computing them. Only attention has to be
launched: its shapes differ in each step, and FlashInfer plans it on the host. The pieces between attentions are graphs, one set
per capture size. A step uses the smallest set that fits; its padding tokens belong to the dummy slot, and attention skips them.
Steps above the largest capture size keep the device busy without graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from text_generation_shard.engines.torch.cuda.device_step import DeviceStep, StepContext
from text_generation_shard.engines.torch.model.decoder import Decoder, ForwardPass

CAPTURE_SIZES = (16, 32, 64, *range(128, 1025, 64))
"""Numbers of tokens to capture; a step is padded to the next one."""
PIECES_PER_GRAPH = 16
"""Number of pieces that take as much driver memory as the graph of a whole step."""

Work = Callable[[], None]
Capture = Callable[[list[Work]], list[Work]]
"""Turns functions into functions that repeat their work on the device in the same memory. May run the functions."""


@dataclass(frozen=True, slots=True)
class _CapturedPass:
    state: ForwardPass
    """Padded to the capture size."""
    pieces: list[Work]


class PiecewiseGraphs:
    """Sets of captured pieces that share memory. Call everything in inference mode."""

    def __init__(self, decoder: Decoder, context: StepContext, dummy_slot: int) -> None:
        self._decoder = decoder
        self._context = context
        self._padding = torch.tensor([[0], [0], [dummy_slot]], dtype=torch.int32, device=context.block_tables.device)
        """A padding token: id, position, slot."""
        self._columns = self._padding.repeat(1, CAPTURE_SIZES[-1])
        self._activations = decoder.activations(CAPTURE_SIZES[-1])
        if self._activations.attended is not None:
            # Attention skips the padding rows, so any finite values do; later steps leave theirs.
            self._activations.attended.zero_()
        self._captured: dict[int, _CapturedPass] = {}

    def record(self, record: Capture, *, only_largest: bool = False) -> None:
        """Capture all sizes, or only the largest to measure its memory. It comes first: the others reuse its memory."""
        for tokens in [CAPTURE_SIZES[-1]] if only_largest else reversed(CAPTURE_SIZES):
            step = DeviceStep(self._columns[:, :tokens], tokens, self._context)
            state = ForwardPass(step, self._activations.first(tokens))
            pieces: list[Work] = [
                partial(self._decoder.piece, index, state) for index in range(self._decoder.num_pieces)
            ]
            self._captured[tokens] = _CapturedPass(state, record(pieces))

    def run(self, step: DeviceStep) -> Tensor | None:
        """Return the same as the decoder's `forward`, valid until the next step; None if no capture size fits."""
        tokens = step.num_tokens
        size = capture_size_for(tokens)
        if size not in self._captured:
            return None
        captured = self._captured[size]
        self._columns[:, :tokens].copy_(step.columns)
        if tokens < size:
            self._columns[:, tokens:size].copy_(self._padding)
        state = ForwardPass(step, captured.state.buffers.first(tokens))
        state.queries = captured.state.queries[:tokens]
        for index, piece in enumerate(captured.pieces):
            if index:
                self._decoder.attend(index - 1, state)
            piece()
        return captured.state.normed[:tokens]

    def __len__(self) -> int:
        """Memory weight of all sets, in whole-step graphs."""
        return len(CAPTURE_SIZES) * -(-self._decoder.num_pieces // PIECES_PER_GRAPH)


def capture_size_for(tokens: int) -> int:
    """Return the smallest capture size ≥ `tokens`; `tokens` itself, which is not a capture size, if there is none."""
    return next((size for size in CAPTURE_SIZES if tokens <= size), tokens)
