"""Steps computed by piecewise graphs, padded to a capture size, give the same results as whole steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from full_grid import full
from lora_folder import random_adapter
from native_families import LATENT
from reference_kernels import ALONE, ReferenceKernels, reference_decoder
from reference_ops import relative_error as error
from tapes import Tapes
from tiny_checkpoint import CONFIG, load_for_cuda, random_tensors, write_checkpoint
from tiny_transformers import random_model, save
from transformers import Gemma4TextConfig, Qwen3_5TextConfig, YoutuConfig

from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.values import Stopping
from text_generation_shard.adapters import LoraAdapter, read_adapters
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import NewSequence, Orders
from text_generation_shard.engines.torch.batch.kv_cache import BLOCK_SIZE, CacheShape
from text_generation_shard.engines.torch.batch.step_plan import (
    Padding,
    StepPlan,
    plan_chunks,
    plan_decoding,
    table_updates,
)
from text_generation_shard.engines.torch.build.prepare import engine_info
from text_generation_shard.engines.torch.engine.runner import ForwardOutput, Model
from text_generation_shard.engines.torch.models.huggingface.config import read_config
from text_generation_shard.engines.torch.models.huggingface.load import load_model
from text_generation_shard.engines.torch.models.huggingface.model import TransformersModel
from text_generation_shard.engines.torch.models.native.config import read_model_config
from text_generation_shard.engines.torch.runner.decode_graphs import GraphPool, wanted_sizes
from text_generation_shard.engines.torch.runner.device_runner import DeviceRunner
from text_generation_shard.engines.torch.runner.piecewise_graphs import (
    CAPTURE_SIZES,
    PiecewiseGraphs,
    Work,
    capture_size_for,
)
from text_generation_shard.step.sequence import SamplerOutput, StepRows
from text_generation_shard.step.table import SequenceTable

LAYERS, SLOTS, MAX_LENGTH, BLOCKS, ADAPTERS = 2, 6, 1280, 128, 2
CHANGES: dict[str, Any] = {
    "model_type": "mistral",
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": MAX_LENGTH,
    "sliding_window": 40,
}


@pytest.fixture(autouse=True)
def stream(device: torch.device) -> Iterator[None]:
    """Run on another stream: graphs cannot be captured on the default stream."""
    with torch.inference_mode(), torch.cuda.stream(None if device.type == "cpu" else torch.cuda.Stream(device)):
        yield


@dataclass
class Rig:
    """Two runners that get the same steps: one computes them whole, the other by piecewise graphs that this object records."""

    whole: DeviceRunner
    piecewise: DeviceRunner
    table: SequenceTable
    device: torch.device
    adapters: int = 0
    """Sequence i has the LoRA adapter i mod (adapters + 1)."""
    replayed: list[int] = field(default_factory=list)
    """The number of each captured piece that ran in the last step."""
    _free: Iterator[int] = field(default_factory=lambda: iter(torch.randperm(BLOCKS).tolist()))

    def __post_init__(self) -> None:
        self._recorder = Tapes() if self.device.type == "cpu" else GraphPool()
        self._numbers = itertools.count()

    def capture(self, *, only_largest: bool = False) -> PiecewiseGraphs:
        """Capture the pieces; their runs are recorded in `replayed`."""
        sizes = wanted_sizes(CAPTURE_SIZES, only_largest, max_tokens=None)
        pieces = self.piecewise.capture_pieces(cast(GraphPool, self), sizes, lambda: None)
        assert pieces is not None
        return pieces

    def begin(self) -> None:
        self._recorder.begin()

    def end(self) -> Work:
        replay, number = self._recorder.end(), next(self._numbers)

        def recorded() -> None:
            self.replayed.append(number)
            replay()

        return recorded

    def admit(self, slot: int, length: int, new: int = 9) -> NewSequence:
        blocks = tuple(next(self._free) for _ in range(-(-(length + new) // BLOCK_SIZE)))
        prompt = tuple(torch.randint(CONFIG["vocab_size"], (length,)).tolist())
        states = ((0, (slot,)),) if self.table.groups[-1].is_state else ()
        stopping = Stopping(max_new_tokens=new)
        return NewSequence(slot=slot, prompt=prompt, stopping=stopping, blocks=blocks, further_blocks=states)

    def step(self, orders: Orders, *, greedy: bool = True) -> tuple[ForwardOutput, ForwardOutput, StepPlan]:
        """Run a step; return the outputs of both runners and the plan."""
        assert self.table.apply(orders) == []
        rows = self.table.rows()
        plan = self._plan(rows, greedy)
        self.replayed.clear()
        output, ours = self.whole.start(plan), self.piecewise.start(plan)
        self.table.begin(rows)
        sampling = [0] * plan.num_sampling if output.sampled is None else output.sampled[: plan.num_sampling].tolist()
        self.table.advance(rows, SamplerOutput(sampling, [0.0] * len(sampling)))
        return output, ours, plan

    def _plan(self, rows: StepRows, greedy: bool) -> StepPlan:
        updates = table_updates(rows, self.whole.table_rows, self.whole.max_blocks)
        slots = {row.sequence.slot for row in rows.others}
        updates += [(self.whole.slot_cell("adapters", slot), slot % (self.adapters + 1)) for slot in slots]
        updates += [(self.whole.slot_cell("states", slot), slot) for slot in slots]
        if rows.prefills:
            plan = plan_chunks(rows, updates, greedy=greedy)
        else:
            plan = plan_decoding(rows, updates, Padding(len(rows), len(updates), SLOTS, (0, 0)), greedy=greedy)
        return plan.with_adapters() if any(slot % (self.adapters + 1) for slot in slots) else plan

    def pieces_of(self, size: int, *, adapted: bool) -> list[int]:
        """Return the numbers of the pieces of a capture size; the largest is captured first, with adapters second."""
        kinds = 2 if self.adapters else 1
        first = ([*reversed(CAPTURE_SIZES)].index(size) * kinds + adapted) * (LAYERS + 1)
        return [*range(first, first + LAYERS + 1)]


def native(folder: Path, device: torch.device, adapters: Sequence[LoraAdapter] = ()) -> tuple[Model, CacheShape, float]:
    """Return the decoder of the checkpoint in `folder`, the shape of its cache and its scale of attention."""
    config = read_model_config(folder)
    weights = load_for_cuda(folder, device, torch.float32, adapters=adapters)
    shape = CacheShape(weights.layer_shapes, device, torch.float32, state_bytes=weights.state_bytes)
    return reference_decoder(config, weights, torch.float32)[1], shape, config.attention_scale


def from_library(folder: Path, device: torch.device) -> tuple[Model, CacheShape, float]:
    """Do the same with the modules of transformers."""
    config = ShardConfig(model_path=str(folder))
    model = TransformersModel(load_model(config, read_config(folder), ALONE, device, torch.float32))
    model.record()
    return model, CacheShape(tuple(model.layers), device, torch.float32), model.rules[0][0]


def with_heads_by_layer(folder: Path, device: torch.device) -> tuple[Model, CacheShape, float]:
    """Do the same with a checkpoint whose layers have different heads, in its place."""
    heads = {"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    config = Gemma4TextConfig(
        **{name: CONFIG[name] for name in ("vocab_size", "hidden_size", "intermediate_size")},
        **heads,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=LAYERS,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=40,
        max_position_embeddings=MAX_LENGTH,
        hidden_size_per_layer_input=0,
    )
    save(random_model(config), folder)
    return native(folder, device)


def with_states(folder: Path, device: torch.device) -> tuple[Model, CacheShape, float]:
    """Do the same with a checkpoint that has a gated delta net before a layer of gated attention, in its place."""
    config = Qwen3_5TextConfig(
        **{name: CONFIG[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")},
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=LAYERS,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=16,
        max_position_embeddings=MAX_LENGTH,
    )
    save(random_model(config), folder)
    return native(folder, device)


def with_latent_rows(folder: Path, device: torch.device) -> tuple[Model, CacheShape, float]:
    """Do the same with a checkpoint of latent attention, in its place."""
    config = YoutuConfig(
        **{name: CONFIG[name] for name in ("vocab_size", "hidden_size", "intermediate_size")},
        **LATENT,
        num_attention_heads=6,
        num_hidden_layers=LAYERS,
        max_position_embeddings=MAX_LENGTH,
    )
    save(random_model(config), folder)
    return native(folder, device)


def with_adapters(folder: Path, device: torch.device) -> tuple[Model, CacheShape, float]:
    """Do the same with two LoRA adapters, which change the embedding and the LM head too."""
    shapes = {
        "model.embed_tokens": (CONFIG["hidden_size"], CONFIG["vocab_size"]),
        "lm_head": (CONFIG["vocab_size"], CONFIG["hidden_size"]),
    } | {
        name.removesuffix(".weight"): (tensor.shape[0], tensor.shape[1])
        for name, tensor in random_tensors(CHANGES).items()
        if "_proj" in name
    }
    for seed in range(ADAPTERS if not (folder / "0").exists() else 0):
        random_adapter(folder / str(seed), shapes, seed)
    text = ",".join(f"{seed}={folder / str(seed)}" for seed in range(ADAPTERS))
    return native(folder, device, read_adapters(ShardConfig(model_path=str(folder), lora_adapters=text)))


OTHERS = from_library, with_heads_by_layer, with_latent_rows, with_adapters


@pytest.fixture(params=[native, with_states, *OTHERS])
def rig(request: pytest.FixtureRequest, tmp_path: Path, device: torch.device) -> Rig:
    torch.manual_seed(5)
    folder = write_checkpoint(tmp_path, random_tensors(CHANGES), CHANGES)

    adapters = ADAPTERS if request.param is with_adapters else 0

    def runner() -> DeviceRunner:
        # Each with its own states.
        model, shape, scale = request.param(folder, device)
        kernels = ReferenceKernels(scale)
        built = DeviceRunner(model, kernels, ALONE, shape, SLOTS, MAX_LENGTH, has_adapters=adapters > 0)
        built.allocate([BLOCKS, SLOTS][: len(built.kinds)])
        return built

    config = ShardConfig(model_path=str(folder), max_batch_size=SLOTS)
    info = engine_info(config, read_model_config(folder), device, None)
    table, whole = SequenceTable(info), runner()
    table.groups = (CacheGroup(BLOCKS), CacheGroup(SLOTS, is_state=True))[: len(whole.kinds)]
    return Rig(whole, runner(), table, device, adapters)


def check(rig: Rig, orders: Orders, size: int | None, *, greedy: bool = True) -> None:
    """Check that both runners give the same results, and which capture size was used."""
    reference, ours, plan = rig.step(orders, greedy=greedy)
    assert rig.replayed == ([] if size is None else rig.pieces_of(size, adapted=plan.adapted))
    assert error(ours.normed, reference.normed) < 1e-5
    assert (ours.logits is None) == (reference.logits is None) == (plan.num_sampling == 0)
    if reference.logits is not None and ours.logits is not None:
        assert error(ours.logits, reference.logits) < 1e-5
    if reference.sampled is not None and ours.sampled is not None:
        assert ours.sampled[: plan.num_sampling].tolist() == reference.sampled[: plan.num_sampling].tolist()
    for layer, expected in zip(rig.piecewise.cache, rig.whole.cache, strict=True):
        # All blocks but the dummy block, which holds the padding.
        assert error(layer[:-1], expected[:-1]) < 1e-5
        assert layer[:-1].eq(0).logical_and(expected[:-1].ne(0)).sum() == 0


def test_piecewise_steps_match_whole_steps(rig: Rig) -> None:
    admit = rig.admit
    rig.capture()
    # A first chunk, padded.
    check(rig, Orders(number=1, placements=(admit(0, 60),), prefill=((0, 21),)), 32)
    # Chunks of several sequences, one of them the end of its prompt.
    check(rig, Orders(number=2, placements=(admit(1, 7), admit(2, 90)), prefill=((0, 20), (1, 7), (2, 30))), 64)
    # A decode row and chunks, without padding.
    check(rig, Orders(number=3, prefill=((0, 19), (2, 44))), 64)
    check(rig, Orders(number=4, prefill=((2, 16),)), 32, greedy=False)
    # Decode steps do not use the pieces.
    check(rig, Orders(number=5), None)
    # A chunk much longer than the window, with three decode rows; then its rest.
    check(rig, Orders(number=6, placements=(admit(3, 280),), prefill=((3, 260),)), 320)
    check(rig, Orders(number=7, prefill=((3, 20),)), 32)
    # A single token, in memory with data of earlier steps.
    check(rig, Orders(number=8, release=(0, 1, 2, 3), placements=(admit(4, 1),), prefill=((4, 1),)), 16)
    check(rig, Orders(number=9), None)


@pytest.mark.parametrize("rig", [native, with_states, *map(full, OTHERS)], indirect=True)
def test_only_the_largest_size_is_captured_to_measure_memory(rig: Rig) -> None:
    assert len(rig.capture(only_largest=True)) >= len(CAPTURE_SIZES)
    # Non-finite padding does not spread.
    dummy_block = len(rig.piecewise.cache[0]) - 1
    for layer in rig.piecewise.cache:
        layer[dummy_block] = torch.nan
    check(rig, Orders(number=1, placements=(rig.admit(0, 961),), prefill=((0, 961),)), 1024)
    assert all(layer[dummy_block, :, :, 0].isfinite().all() for layer in rig.piecewise.cache)
    # Steps of other sizes, and larger ones, are computed whole.
    check(rig, Orders(number=2, placements=(rig.admit(1, 12),), prefill=((1, 12),)), None)
    check(rig, Orders(number=3, release=(0,), placements=(rig.admit(2, 1025),), prefill=((2, 1025),)), None)


@pytest.mark.parametrize("rig", [native, with_states, *map(full, OTHERS)], indirect=True)
def test_a_new_kv_cache_drops_the_pieces(rig: Rig) -> None:
    rig.capture(only_largest=True)
    rig.piecewise.allocate([BLOCKS, SLOTS][: len(rig.piecewise.kinds)])
    check(rig, Orders(number=1, placements=(rig.admit(0, 970),), prefill=((0, 970),)), None)


def test_the_smallest_capture_size_that_fits_is_used() -> None:
    sizes = {1: 16, 16: 16, 17: 32, 64: 64, 65: 128, 129: 192, 960: 960, 961: 1024, 1024: 1024}
    assert {tokens: capture_size_for(tokens) for tokens in sizes} == sizes
    assert capture_size_for(CAPTURE_SIZES[-1] + 1) not in CAPTURE_SIZES
    assert wanted_sizes((1, 2, 4, 8), only_largest=False, max_tokens=4) == [4, 2, 1]
