"""The kernels of layers with a state, for the kernel benchmark: their errors against plain torch in float64, and their times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from text_generation_bench.kernel_timing import DEVICE, LAUNCHES, Launch, Table, ints, randn, timed
from text_generation_shard.engines.torch.batch.state_rows import StateChunk, StateRows
from text_generation_shard.engines.torch.kernels.convolution import convolve
from text_generation_shard.engines.torch.kernels.gated_norm import gated_norm
from text_generation_shard.engines.torch.kernels.operands import Convolution, GatedNorm, Recurrence
from text_generation_shard.engines.torch.kernels.scan import scan
from text_generation_shard.engines.torch.layers import recurrence as plain

SLOTS = 256
DRAFTS = 3
DECODE_ROWS = (1, 32, 128, 256)
PROMPTS = ((512,), (8192,), (512,) * 16)
TAPS = 4
MOST_ERROR = 2e-2
"""Largest relative error of outputs, which are bfloat16, and of states."""


@dataclass(frozen=True)
class Shape:
    """The layer of a model."""

    name: str
    groups: int
    heads: int
    key_width: int
    value_width: int
    delta: bool

    @property
    def channels(self) -> int:
        return 2 * self.groups * self.key_width + self.heads * self.value_width

    def recurrence(self) -> Recurrence:
        keys = self.groups * self.key_width
        return Recurrence(
            heads=self.heads,
            groups=self.groups,
            key_width=self.key_width,
            value_width=self.value_width,
            query_start=0,
            key_start=keys,
            value_start=2 * keys,
            decay=torch.rand(self.heads, device=DEVICE) + 0.1,
            step_bias=torch.randn(self.heads, device=DEVICE) - 2,
            skip=None if self.delta else torch.ones(self.heads, device=DEVICE),
            delta=self.delta,
        )


SHAPES = (
    Shape("Qwen3-Next", 16, 32, 128, 128, delta=True),
    Shape("Granite-4-small", 1, 128, 128, 64, delta=False),
    Shape("Falcon-H1-34B", 2, 32, 256, 128, delta=False),
)


@dataclass
class Inputs:
    """Random inputs of a layer, and its states."""

    shape: Shape
    tokens: int
    drafts: int = 0

    def __post_init__(self) -> None:
        shape = self.shape
        self.x = randn(self.tokens, shape.channels)
        self.steps, self.betas = randn(self.tokens, shape.heads), randn(self.tokens, shape.heads)
        self.history = randn(SLOTS + 1, TAPS - 1 + self.drafts, shape.channels)
        self.states = torch.randn(SLOTS + 1, shape.heads, shape.key_width, shape.value_width, device=DEVICE)
        self.recurrence = shape.recurrence()
        places = 2 * self.drafts + 1 if self.drafts else 0
        self.drafted = randn(SLOTS + 1, places, self.recurrence.draft_width)
        self.convolution = Convolution(randn(TAPS, shape.channels), None, activates=True)

    def scan(self, rows: StateRows) -> Tensor:
        betas = self.betas if self.shape.delta else None
        return scan(self.x, self.steps, betas, self.recurrence, self.states, self.drafted, rows)


def decode_rows(rows: int, first: int = 0, drafts: int = 0) -> StateRows:
    """Return rows with drafts that continue sequences with states from `first` on; half of the last drafts were right."""
    places = range(1 + drafts)
    slots = [(first + row) % SLOTS for row in range(rows) for _ in places]
    positions = [7 + place for _ in range(rows) for place in places]
    return StateRows(len(slots), ints(slots), ints(positions), ints([drafts // 2] * len(slots)))


def chunk_rows(lengths: tuple[int, ...], start: int = 64, rest: int = 0) -> StateRows:
    """Return chunks of several sequences that begin at the position `start`, with a checkpoint before the last `rest` tokens."""
    positions: list[int] = []
    chunks, ends = [], [0]
    for block, length in enumerate(lengths):
        chunks.append(StateChunk(block, block, start, ends[-1], length, len(lengths) + block, rest))
        positions += range(start, start + length)
        ends.append(ends[-1] + length)
    blocks = ints(list(range(len(lengths))))
    behind = ints([0] * len(positions))
    checkpoints, rests = blocks + len(lengths), torch.full_like(blocks, rest)
    return StateRows(
        0, ints([]), ints(positions), behind, tuple(chunks), ints(ends), blocks, blocks, checkpoints, rests
    )


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def check(shape: Shape, rows: StateRows, name: str) -> bool:
    """Print the errors of the kernels with some rows; return True if they are small."""
    inputs = Inputs(shape, len(rows.positions))
    exact_history, exact_states = inputs.history.double(), inputs.states.double()
    exact_convolution = Convolution(inputs.convolution.weight.double(), None, activates=True)
    expected = plain.convolve(inputs.x.double(), exact_convolution, exact_history, rows)
    errors = {"convolve": error(convolve(inputs.x, inputs.convolution, inputs.history, rows), expected)}
    errors["its state"] = error(inputs.history, exact_history)
    betas = inputs.betas.double() if shape.delta else None
    x, steps = inputs.x.double(), inputs.steps.double()
    expected = plain.scan(x, steps, betas, inputs.recurrence, exact_states, inputs.drafted, rows)
    errors["scan"] = error(inputs.scan(rows), expected)
    errors["its states"] = error(inputs.states, exact_states)
    width = shape.value_width if shape.delta else shape.heads * shape.value_width
    x, gate = randn(8, shape.heads * shape.value_width), randn(8, shape.heads * shape.value_width)
    norm = GatedNorm(randn(shape.heads * shape.value_width), 1e-6, width, not shape.delta)
    errors["gated norm"] = error(gated_norm(x, gate, norm), plain.gated_norm(x.double(), gate.double(), norm))
    is_right = all(each <= MOST_ERROR for each in errors.values())
    found = ", ".join(f"{part} {each:.1e}" for part, each in errors.items())
    print(f"{'right' if is_right else 'WRONG'}: {shape.name}, {name}: {found}")
    return is_right


def states(table: Table) -> None:
    """Check all shapes, then time them. Raises SystemExit if a kernel is wrong."""
    cases = {"32 rows": decode_rows(32), "continued prompts": chunk_rows((200, 64, 3))}
    cases["a new prompt"] = chunk_rows((130,), start=0)
    cases["checkpoints within prompts"] = chunk_rows((200, 129), rest=70)
    results = [check(shape, rows, name) for shape in SHAPES for name, rows in cases.items()]
    if not all(results):
        raise SystemExit("a kernel is wrong")
    for shape in SHAPES:
        for count in DECODE_ROWS:
            inputs = Inputs(shape, count)
            # Other slots in each launch, so that their states are not in the L2 cache.
            some = [decode_rows(count, count * launch) for launch in range(LAUNCHES)]
            nbytes = 2 * count * inputs.states[0].nbytes
            table.row(
                f"{shape.name}: recurrent step", count, timed([partial(inputs.scan, rows) for rows in some]), nbytes
            )
            table.row("  convolution", count, timed(convolutions(inputs, some)), 2 * count * inputs.history[0].nbytes)
            inputs = Inputs(shape, (1 + DRAFTS) * count, DRAFTS)
            some = [decode_rows(count, count * launch, DRAFTS) for launch in range(LAUNCHES)]
            table.row(f"  with {DRAFTS} drafts", count, timed([partial(inputs.scan, rows) for rows in some]), nbytes)
            table.row("  convolution", count, timed(convolutions(inputs, some)), 2 * count * inputs.history[0].nbytes)
            table.row("  gated norm", count, timed(norms(shape, count)), 6 * count * shape.heads * shape.value_width)
        for lengths in PROMPTS:
            inputs, rows = Inputs(shape, sum(lengths)), chunk_rows(lengths)
            name = f"{shape.name}: {len(lengths)} prompts" if len(lengths) > 1 else f"{shape.name}: a prompt"
            table.row(name, sum(lengths), timed([partial(inputs.scan, rows)] * 4), 2 * inputs.x.nbytes)
            table.row("  convolution", sum(lengths), timed(convolutions(inputs, [rows] * 4)), 2 * inputs.x.nbytes)


def convolutions(inputs: Inputs, some: list[StateRows]) -> list[Launch]:
    call: Callable[[StateRows], Tensor] = partial(convolve, inputs.x, inputs.convolution, inputs.history)
    return [partial(call, rows) for rows in some]


def norms(shape: Shape, rows: int) -> list[Launch]:
    columns = shape.heads * shape.value_width
    x, gate, out = (randn(rows, columns) for _ in range(3))
    norm = GatedNorm(randn(columns), 1e-6, shape.value_width if shape.delta else columns, not shape.delta)
    return [partial(gated_norm, x, gate, norm, out)] * LAUNCHES
