"""The kernels of layers with a state, against the same operations in plain torch and float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import NamedTuple

import pytest
import torch
from full_grid import full
from reference_ops import relative_error
from torch import Tensor
from torch.nn import functional

from text_generation_shard.engines.torch.batch.state_rows import StateChunk, StateRows
from text_generation_shard.engines.torch.kernels import convolution, gated_norm, scan
from text_generation_shard.engines.torch.kernels.operands import Convolution, GatedNorm, Recurrence
from text_generation_shard.engines.torch.layers import recurrence

BLOCKS = 9
SPARE = 3
"""Columns of wider buffers that the inputs are part of."""


class Case(NamedTuple):
    decoding: tuple[int, ...]
    """Blocks of decode rows."""
    chunks: tuple[tuple[int, ...], ...]
    """Blocks before and after, first position and length of chunks; block of a checkpoint within and the tokens after it."""


CASES = {
    "decode rows, one of padding": Case((4, BLOCKS, 0, 7), ()),
    "a new prompt": Case((), ((2, 2, 0, 70),)),
    "both, and chunks shorter than the convolution": Case(
        (1, 3), ((5, 5, 0, 2), (0, 0, 9, 1), (8, 8, 64, 66), (2, 2, 0, 33))
    ),
    "checkpoints": Case((3,), ((8, 5, 9, 1), (8, 6, 64, 66), (0, 1, 16, 2), (7, 7, 16, 3))),
    "checkpoints within chunks": Case(
        (3,), ((8, 5, 9, 70, 1, 5), (6, 7, 64, 140, 6, 70), (0, 2, 16, 2, 0, 1), (4, 4, 0, 9))
    ),
}


def rows_of(case: Case, device: torch.device) -> StateRows:
    positions, chunks, ends = [5] * len(case.decoding), [], [0]
    for read, write, start, length, *checkpoint in case.chunks:
        chunks.append(StateChunk(read, write, start, len(positions), length, *checkpoint))
        positions += range(start, start + length)
        ends.append(ends[-1] + length)
    of_chunks = zip(*((each.read, each.write, each.checkpoint, each.rest) for each in chunks), strict=True)
    columns = case.decoding, positions, ends, *(of_chunks if chunks else [()] * 4)
    blocks, places, *others = [torch.tensor(each, dtype=torch.int32, device=device) for each in columns]
    return StateRows(len(case.decoding), blocks, places, torch.zeros_like(places), tuple(chunks), *others)


def part(values: Tensor) -> Tensor:
    """Return equal values within a buffer of longer rows."""
    wide = torch.full((len(values), values.shape[1] + SPARE), math.nan, dtype=values.dtype, device=values.device)
    wide[:, : values.shape[1]] = values
    return wide[:, : values.shape[1]]


def check(out: Tensor, expected: Tensor, states: Tensor, expected_states: Tensor, case: Case, tolerance: float) -> None:
    """Compare outputs, but those of padding, and all blocks, most of which must not change."""
    real = [row for row in range(len(out)) if row >= len(case.decoding) or case.decoding[row] != BLOCKS]
    assert relative_error(out[real], expected[real]) < tolerance
    assert not out[[row for row in range(len(out)) if row not in real]].any()
    assert relative_error(states[:BLOCKS], expected_states[:BLOCKS]) < tolerance


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("taps", "bias", "activates"), [(4, True, True), (3, False, False)])
def test_convolutions(case: Case, taps: int, bias: bool, activates: bool, device: torch.device) -> None:
    rows, channels = rows_of(case, device), 70
    x = part(torch.randn(len(rows.positions), channels, device=device))
    states = torch.randn(BLOCKS + 1, taps - 1, channels, device=device)
    weight = torch.randn(taps, channels, device=device)
    own = Convolution(weight, torch.randn(channels, device=device) if bias else None, activates)
    exact = Convolution(weight.double(), own.bias.double() if own.bias is not None else None, activates)
    expected_states = states.double()
    expected = recurrence.convolve(x.double(), exact, expected_states, rows)
    out = convolution.convolve(x, own, states, rows)
    check(out, expected, states, expected_states, case, 1e-6)


def random_recurrence(kind: str, keys: int, values: int, device: torch.device) -> Recurrence:
    heads, groups = 4, 2
    return Recurrence(
        heads=heads,
        groups=groups,
        key_width=keys,
        value_width=values,
        query_start=0,
        key_start=groups * keys,
        value_start=2 * groups * keys,
        decay=torch.rand(heads, device=device) * 0.2,
        step_bias=torch.randn(heads, device=device),
        skip=None if kind == "delta" else torch.randn(heads, device=device),
        delta=kind == "delta",
        beta_scale=2.0 if kind == "delta" else 1.0,
        step_limits=(0.0, math.inf) if kind == "delta" else (0.1, 0.9),
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    ("kind", "keys", "values"),
    [("delta", 16, 36), ("selective", 20, 16), full("delta", 128, 128), full("selective", 128, 64)],
)
def test_recurrences(case: Case, kind: str, keys: int, values: int, device: torch.device) -> None:
    rows, own = rows_of(case, device), random_recurrence(kind, keys, values, device)
    tokens, heads = len(rows.positions), own.heads
    qkv = part(torch.randn(tokens, own.value_start + heads * values, device=device))
    steps = part(torch.randn(tokens, heads, device=device))
    betas = part(torch.randn(tokens, heads, device=device)) if own.delta else None
    states = torch.randn(BLOCKS + 1, heads, keys, values, device=device)
    expected_states = states.double()
    exact = None if betas is None else betas.double()
    none = torch.empty(BLOCKS + 1, 0, own.draft_width, device=device)
    expected = recurrence.scan(qkv.double(), steps.double(), exact, own, expected_states, none, rows)
    out = scan.scan(qkv, steps, betas, own, states, none, rows)
    # The interpreter does not round the operands of products.
    rounds = device.type == "cuda" and case.chunks
    check(out, expected, states, expected_states, case, 5e-3 if rounds else 1e-5)


@pytest.mark.parametrize("kind", ["delta", "selective"])
def test_plain_torch_is_exact_where_decays_are_fast(kind: str, device: torch.device) -> None:
    rows, own = rows_of(CASES["a new prompt"], device), random_recurrence(kind, 16, 20, device)
    own = replace(own, decay=torch.linspace(1.0, 12.0, own.heads, device=device), step_limits=(0.0, math.inf))
    widths = [own.value_start + own.heads * 20, own.heads, *([own.heads] if own.delta else [])]
    inputs = [torch.randn(len(rows.positions), width, device=device) for width in widths]
    inputs[1] *= 4  # some decays are fast, others slow
    outs = []
    for dtype in (torch.float32, torch.float64):
        qkv, steps, betas, *_ = (*(each.to(dtype) for each in inputs), None)
        states = torch.zeros(BLOCKS + 1, own.heads, 16, 20, device=device, dtype=dtype)
        drafted = torch.empty(BLOCKS + 1, 0, own.draft_width, device=device)
        outs.append(recurrence.scan(qkv, steps, betas, own, states, drafted, rows))
    assert relative_error(*outs) < 1e-6


WITHOUT_REST = {name: case for name, case in CASES.items() if all(len(chunk) == 4 for chunk in case.chunks)}


@pytest.mark.parametrize(
    "case", [each if each.decoding == () else full(each) for each in WITHOUT_REST.values()], ids=WITHOUT_REST
)
def test_states_are_rounded_to_the_type_of_their_pool(case: Case, device: torch.device) -> None:
    rows, own = rows_of(case, device), random_recurrence("delta", 16, 36, device)
    tokens, heads = len(rows.positions), own.heads
    qkv, steps, betas = (
        torch.randn(tokens, width, device=device) for width in (own.value_start + heads * 36, heads, heads)
    )
    rounded = torch.randn(BLOCKS + 1, heads, 16, 36, device=device).half()
    exact = rounded.float()
    none = torch.empty(BLOCKS + 1, 0, own.draft_width, device=device)
    outs = [scan.scan(qkv, steps, betas, own, states, none, rows) for states in (rounded, exact)]
    assert outs[0].equal(outs[1])
    assert rounded[:BLOCKS].equal(exact[:BLOCKS].half())


@pytest.mark.parametrize("kind", ["delta", "selective"])
def test_a_chunk_with_a_checkpoint_is_computed_as_two(kind: str, device: torch.device) -> None:
    """Bit for bit: it goes on from the state as it is stored."""
    chunks = (6, 7, 64, 140, 1, 70), (6, 1, 64, 70), (1, 7, 134, 70)
    whole, *parts = (rows_of(Case((), (chunk,)), device) for chunk in chunks)
    own = random_recurrence(kind, 16, 36, device)
    widths = own.value_start + own.heads * 36, own.heads, own.heads
    inputs = [torch.randn(140, width, device=device) for width in widths]
    states = torch.randn(BLOCKS + 1, own.heads, 16, 36, device=device).half()
    none = torch.empty(BLOCKS + 1, 0, own.draft_width, device=device)

    def scanned(some: list[StateRows], pool: torch.Tensor) -> torch.Tensor:
        outs, first = [], 0
        for rows in some:
            end = first + len(rows.positions)
            qkv, steps, betas = (each[first:end] for each in inputs)
            outs.append(scan.scan(qkv, steps, betas if own.delta else None, own, pool, none, rows))
            first = end
        return torch.cat(outs)

    pools = states.clone(), states.clone()
    assert scanned([whole], pools[0]).equal(scanned(parts, pools[1]))
    assert pools[0].equal(pools[1])


DRAFTED_BLOCKS = (4, 0)
TOKENS, DRAFTS = 8, 3
Operation = Callable[[Tensor, StateRows], Tensor]
MODULES = {"kernel": (convolution.convolve, scan.scan), "plain": (recurrence.convolve, recurrence.scan)}


def convolutions(taps: int, name: str, device: torch.device) -> tuple[int, list[Operation]]:
    """Return the columns of the inputs, and an operation twice, for steps without and with drafts, from the same states."""
    own = Convolution(torch.randn(taps, 70, device=device), None, activates=True)
    history = torch.randn(BLOCKS + 1, taps - 1, 70, device=device)
    pools = [functional.pad(history, (0, 0, 0, drafts), value=math.nan) for drafts in (0, DRAFTS)]
    return 70, [partial(lambda pool, x, rows: MODULES[name][0](x, own, pool, rows), pool) for pool in pools]


def recurrences(kind: str, name: str, device: torch.device) -> tuple[int, list[Operation]]:
    """Do as `convolutions`."""
    own = random_recurrence(kind, 16, 20, device)
    widths = [own.value_start + own.heads * 20, own.heads, own.heads]
    # Products of plain torch depend on the number of rows, and so does their rounding.
    dtype = torch.float16 if name == "kernel" else torch.float32
    states = torch.randn(BLOCKS + 1, own.heads, 16, 20, device=device).to(dtype)

    def of(places: int) -> Operation:
        pool = states.clone()
        drafted = torch.full((BLOCKS + 1, places, own.draft_width), math.nan, device=device)

        def run(x: Tensor, rows: StateRows) -> Tensor:
            qkv, steps, betas = (part(each) for each in torch.split(x, widths, dim=1))
            return MODULES[name][1](qkv, steps, betas if own.delta else None, own, pool, drafted, rows)

        return run

    return sum(widths), [of(0), of(2 * DRAFTS + 1)]


OPERATIONS = {
    "convolution": partial(convolutions, 4),
    "short convolution": partial(convolutions, 3),
    "delta": partial(recurrences, "delta"),
    "selective": partial(recurrences, "selective"),
}


@pytest.mark.parametrize("make", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("name", ["kernel", "plain"])
def test_drafts_that_were_right_count_as_steps_and_others_leave_nothing(
    make: Callable[[str, torch.device], tuple[int, list[Operation]]], name: str, device: torch.device
) -> None:
    draw = Random(5)
    width, (single, several) = make(name, device)
    tokens = torch.randn(TOKENS, len(DRAFTED_BLOCKS), width, device=device)
    blocks = torch.tensor(DRAFTED_BLOCKS, dtype=torch.int32, device=device)
    zeros = torch.zeros_like(blocks)
    expected = torch.stack(
        [single(x, StateRows(len(blocks), blocks, zeros + at, zeros)) for at, x in enumerate(tokens)]
    )
    ats, behind = [0] * len(blocks), [0] * len(blocks)
    while min(ats) < TOKENS:
        inputs, columns, wanted = [], [], []
        for row, block in enumerate(DRAFTED_BLOCKS):
            right = min(draw.choice((1, 2, DRAFTS + 1)), TOKENS - ats[row])
            count = draw.choice((right, DRAFTS + 1)) if right else 0
            if not count:
                continue
            inputs += [*tokens[ats[row] : ats[row] + right, row], *torch.randn(count - right, width, device=device)]
            wanted += [expected[ats[row] + place, row] if place < right else None for place in range(count)]
            columns += [(block, ats[row] + place, behind[row]) for place in range(count)]
            ats[row] += right
            behind[row] = right - 1
        # Two tokens of padding.
        inputs += [torch.zeros(width, device=device)] * (2 * (name == "kernel"))
        columns += [(BLOCKS, 0, 0)] * (len(inputs) - len(columns))
        numbers = torch.tensor(columns, dtype=torch.int32, device=device)
        out = several(torch.stack(inputs), StateRows(len(numbers), *numbers.T.contiguous()))
        for own, reference in zip(out, wanted, strict=False):
            assert reference is None or relative_error(own, reference) < (1e-6 if device.type == "cpu" else 3e-4)
        assert not out[len(wanted) :].any()


@pytest.mark.parametrize("gate_first", [True, False])
def test_gated_norms(gate_first: bool, device: torch.device) -> None:
    x, gate = (part(torch.randn(5, 36, device=device)) for _ in range(2))
    norm = GatedNorm(torch.randn(36, device=device), 1e-2, 12, gate_first)
    exact = GatedNorm(norm.weight.double(), 1e-2, 12, gate_first)
    expected = recurrence.gated_norm(x.double(), gate.double(), exact)
    assert relative_error(gated_norm.gated_norm(x, gate, norm), expected) < 1e-6
    out = torch.empty(5, 36, dtype=torch.float16, device=device)
    gated_norm.gated_norm(x, gate, norm, out)
    assert relative_error(out, expected) < 1e-3
