"""Decode attention over the paged cache, compared with the formula in float64."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from full_grid import full
from reference_kernels import attend, loaded, narrowed
from reference_ops import relative_error as error
from torch import Tensor

from text_generation_shard.engines.torch.batch.kv_cache import BLOCK_SIZE
from text_generation_shard.engines.torch.kernels.decode_attention import DecodeAttention
from text_generation_shard.engines.torch.kernels.decode_launch import LaunchConfig, Merge, config_for, row_places
from text_generation_shard.engines.torch.kernels.operands import DecodeStep
from text_generation_shard.engines.torch.runner.decode_graphs import capture_sizes

TOLERANCES = {torch.bfloat16: 4e-3, torch.float16: 1e-3}
H200_MULTIPROCESSORS = 132


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int


DIVIDED = LaunchConfig(programs=5, warps=4, stages=3, merge="last arrival")
SMOL = Shape(9, 3, 64)
LLAMA = Shape(8, 2, 128)


@dataclass(frozen=True)
class Case:
    """Rows of given lengths. Cache positions that no row may read are NaN."""

    shape: Shape
    qkv: Tensor
    cache_layer: Tensor
    step: DecodeStep

    @property
    def queries(self) -> Tensor:
        return self.qkv[:, : self.shape.heads * self.shape.head_dim].view(-1, self.shape.heads, self.shape.head_dim)

    def expected(self, window: int | None, sinks: Tensor | None = None, scales: Tensor | None = None) -> Tensor:
        step, rows, cache_layer = self.step, [], loaded(self.cache_layer, scales)
        for query, position, slot in zip(self.queries.double(), step.positions.tolist(), step.slots, strict=True):
            table, rules = step.block_tables[slot], (window, step.scale, step.softcap, sinks)
            rows.append(attend(query.unsqueeze(0), cache_layer, table, position + 1, *rules))
        return torch.cat(rows)

    def run(
        self,
        attention: DecodeAttention,
        window: int | None = None,
        out_dtype: torch.dtype | None = None,
        sinks: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> Tensor:
        shape, out_dtype = self.shape, out_dtype or self.qkv.dtype
        out = torch.full(
            (len(self.qkv), shape.heads * shape.head_dim), torch.nan, dtype=out_dtype, device=self.qkv.device
        )
        attention.run(self.queries, self.cache_layer, self.step, window, out, sinks, scales)
        return out


def a_case(
    shape: Shape, lengths: list[int], device: torch.device, dtype: torch.dtype, window: int | None = None
) -> Case:
    """Return rows with random slots and blocks."""
    slots = torch.randperm(len(lengths) + 3)[: len(lengths)]
    sizes = [-(-length // BLOCK_SIZE) for length in lengths]
    numbers = torch.randperm(sum(sizes) + 5).int()
    tables = torch.full((len(lengths) + 3, max(sizes)), 1 << 30, dtype=torch.int32)
    cache = torch.full((len(numbers), 2, shape.kv_heads, BLOCK_SIZE, shape.head_dim), torch.nan, dtype=dtype)
    for slot, length, own in zip(slots, lengths, numbers.split([*sizes, 5]), strict=False):
        tables[slot, : len(own)] = own
        for position in range(0 if window is None else max(0, length - window), length):
            cache[own[position // BLOCK_SIZE], :, :, position % BLOCK_SIZE] = torch.randn(
                2, shape.kv_heads, shape.head_dim
            )
    qkv = 2 * torch.randn(len(lengths), (shape.heads + 2 * shape.kv_heads) * shape.head_dim, dtype=dtype)
    positions = torch.tensor(lengths, dtype=torch.int32) - 1
    step = DecodeStep(positions.to(device), slots.int().to(device), tables.to(device), shape.head_dim**-0.5)
    return Case(shape, qkv.to(device), cache.to(device), step)


@pytest.mark.parametrize("merge", ["second kernel", "last arrival"])
def test_capped_scores_and_sinks(merge: Merge, device: torch.device, dtype: torch.dtype) -> None:
    case = a_case(SMOL, [1, 16, 70, 17], device, dtype)
    case = replace(case, step=replace(case.step, softcap=1.5))
    sinks = torch.linspace(-2, 3, SMOL.heads, dtype=torch.float64, device=device)
    out = case.run(DecodeAttention(*SMOL, 4, device, config=replace(DIVIDED, merge=merge)), sinks=sinks.float())
    assert error(out, case.expected(None, sinks)) < TOLERANCES[dtype]


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, full(torch.float8_e5m2)], ids=str)
def test_fp8_keys_and_values_are_multiplied_by_the_scales_of_their_head(
    stored: torch.dtype, device: torch.device, dtype: torch.dtype
) -> None:
    case = a_case(LLAMA, [1, 16, 70, 17], device, torch.float32)
    case = replace(case, qkv=case.qkv.to(dtype), cache_layer=case.cache_layer.to(stored))
    scales = torch.tensor([[0.5, 1.3], [3.0, 0.2]], device=device)
    for given in (None, scales):
        out = case.run(DecodeAttention(*LLAMA, 4, device, config=DIVIDED), scales=given)
        assert error(out, case.expected(None, scales=given)) < TOLERANCES[dtype]


@pytest.mark.parametrize(
    ("shape", "window", "factor"), [(Shape(6, 1, 96), 30, 5.0), (SMOL, None, 0.0), full(Shape(2, 1, 256), None, 1e-3)]
)
def test_fp8_with_queries_of_any_size(
    shape: Shape, window: int | None, factor: float, device: torch.device, dtype: torch.dtype
) -> None:
    """Queries are divided by the largest number of a group; capped scores and sinks are those of whole queries."""
    case = a_case(shape, [1, 16, 70, 17], device, torch.float32, window)
    case = replace(case, qkv=(factor * case.qkv).to(dtype), cache_layer=case.cache_layer.to(torch.float8_e4m3fn))
    case = replace(case, step=replace(case.step, softcap=1.5))
    sinks = torch.linspace(-2, 3, shape.heads, dtype=torch.float64, device=device)
    out = case.run(DecodeAttention(*shape, 4, device, config=DIVIDED), window, sinks=sinks.float())
    assert error(out, case.expected(window, sinks)) < TOLERANCES[dtype]


@pytest.mark.parametrize(
    ("window", "merge"),
    [(None, "second kernel"), (30, "last arrival"), full(None, "last arrival"), full(30, "second kernel")],
)
@pytest.mark.parametrize(
    "shape",
    [
        SMOL,
        full(LLAMA),
        full(Shape(14, 2, 64)),
        full(Shape(2, 2, 32)),
        full(Shape(24, 1, 96)),
        full(Shape(2, 1, 256)),
        full(Shape(8, 1, 512)),
    ],
    ids=lambda shape: f"{shape.heads}-{shape.kv_heads}x{shape.head_dim}",
)
def test_rows_of_different_lengths_match_the_formula(
    shape: Shape, window: int | None, merge: Merge, device: torch.device, dtype: torch.dtype
) -> None:
    case = a_case(shape, [1, 16, 70, 17], device, dtype, window)
    attention = DecodeAttention(*shape, 4, device, config=replace(DIVIDED, merge=merge))
    for other in (case, a_case(shape, [20, 40, 3, 90], device, dtype, window)):  # other numbers of parts
        assert error(other.run(attention, window), other.expected(window)) < TOLERANCES[dtype]


@pytest.mark.parametrize("merge", ["second kernel", "last arrival"])
def test_a_single_long_row_is_read_by_many_programs(merge: Merge, device: torch.device, dtype: torch.dtype) -> None:
    shape = Shape(8, 1, 128)
    config = config_for(1, *shape, H200_MULTIPROCESSORS)
    assert config.programs > 700 / BLOCK_SIZE
    case = a_case(shape, [700], device, dtype)
    attention = DecodeAttention(*shape, 1, device, config=replace(config, merge=merge))
    first, second = case.run(attention), case.run(attention)
    assert error(first, case.expected(None)) < TOLERANCES[dtype]
    assert torch.equal(first, second)


@pytest.mark.parametrize("merge", ["second kernel", "last arrival"])
@pytest.mark.parametrize("programs", [1, 2, 3, 7, 40])
def test_a_program_reads_a_part_of_a_row_or_several_rows(
    programs: int, merge: Merge, device: torch.device, dtype: torch.dtype
) -> None:
    case = a_case(LLAMA, [5, 300, 1, 16, 33, 90, 2], device, dtype)
    attention = DecodeAttention(*LLAMA, 7, device, config=replace(DIVIDED, programs=programs, merge=merge))
    assert error(case.run(attention), case.expected(None)) < TOLERANCES[dtype]


@pytest.mark.parametrize(
    ("lengths", "programs", "window"),
    [([130] * 7, 4, None), ([130, 125, 135, 110, 128, 130, 121], 15, None), ([140, 3, 137, 132, 60, 65, 1], 7, 60)],
)
def test_rows_are_cut_at_the_same_places(
    lengths: list[int], programs: int, window: int | None, device: torch.device, dtype: torch.dtype
) -> None:
    case = a_case(SMOL, lengths, device, dtype, window)
    attention = DecodeAttention(*SMOL, 7, device, config=replace(DIVIDED, programs=programs))
    assert error(case.run(attention, window), case.expected(window)) < TOLERANCES[dtype]


def test_several_rows_may_use_the_dummy_slot(device: torch.device, dtype: torch.dtype) -> None:
    case = a_case(SMOL, [40, 1], device, dtype)
    slots = case.step.slots[[0, 1, 1]]
    padded = replace(
        case, qkv=case.qkv[[0, 1, 1]], step=replace(case.step, slots=slots, positions=case.step.positions[[0, 1, 1]])
    )
    assert (
        error(padded.run(DecodeAttention(*SMOL, 3, device, config=DIVIDED)), padded.expected(None)) < TOLERANCES[dtype]
    )


def test_a_second_kernel_merges_if_there_are_few_rows() -> None:
    merges = [config_for(rows, 32, 8, 128, H200_MULTIPROCESSORS).merge for rows in (1, 8, 32, 128)]
    assert merges == ["second kernel", "second kernel", "last arrival", "last arrival"]


@pytest.mark.parametrize("max_rows", [1, 20, 40, 256])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 5, 8])
def test_all_kernels_run_in_steps_of_captured_sizes(kv_heads: int, max_rows: int) -> None:
    """The decode rows beside prompts are of any number: they must not wait for a compiler."""

    def kernels(sizes: Iterable[int]) -> set[tuple[int, Merge]]:
        configs = [(rows, config_for(rows, 4 * kv_heads, kv_heads, 64, H200_MULTIPROCESSORS)) for rows in sizes]
        return {(row_places(rows, max_rows), config.merge) for rows, config in configs}

    assert kernels(capture_sizes(max_rows)) == kernels(range(1, max_rows + 1))


@pytest.mark.parametrize(("heads", "latent", "rotated"), [(4, 32, 16), (40, 24, 8), full(128, 512, 64)])
@pytest.mark.parametrize("merge", ["second kernel", "last arrival"])
def test_heads_attend_to_latent_rows(
    heads: int, latent: int, rotated: int, merge: Merge, device: torch.device, dtype: torch.dtype
) -> None:
    """The first columns of a row are the value; the other columns of the reference's results are left out."""
    shape = Shape(heads, 1, latent + rotated)
    case = a_case(shape, [1, 16, 70, 17], device, dtype)
    case = replace(case, cache_layer=case.cache_layer[:, :1].contiguous())
    out = torch.full((4, heads * latent), torch.nan, dtype=dtype, device=device)
    attention = DecodeAttention(*shape, 4, device, latent=latent, config=replace(DIVIDED, merge=merge))
    attention.run(case.queries, case.cache_layer, case.step, None, out)
    assert error(out, narrowed(case.expected(None), case.queries, out)) < TOLERANCES[dtype]
