"""Steps computed in pieces, padded to a bucket, leave what steps computed in one go leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import CONFIG, random_tensors, write_checkpoint
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from text_generation_proto.values import Stopping
from text_generation_shard.engine import EngineInfo, NewSequence, Orders, Scheduling
from text_generation_shard.engines.torch.cuda.graphs import ForwardOutput, GraphPool
from text_generation_shard.engines.torch.cuda.layers import ModelWeights
from text_generation_shard.engines.torch.cuda.parallel.group import ParallelGroup
from text_generation_shard.engines.torch.cuda.piecewise_graphs import (
    CAPTURE_SIZES,
    PiecewiseGraphs,
    Work,
    capture_size_for,
)
from text_generation_shard.engines.torch.cuda.reference_ops import ReferenceOps
from text_generation_shard.engines.torch.cuda.runner import Runner
from text_generation_shard.engines.torch.cuda.slot_tables import SlotTables
from text_generation_shard.engines.torch.cuda.step_plan import Padding, StepPlan, plan_chunks, plan_decoding
from text_generation_shard.engines.torch.cuda.tensor_parallel import TensorParallelRank
from text_generation_shard.engines.torch.kv_cache import BLOCK_SIZE, CacheShape
from text_generation_shard.engines.torch.model_config import read_model_config
from text_generation_shard.engines.torch.weights import load_weights
from text_generation_shard.step.rows import SamplerOutput, StepRows
from text_generation_shard.step.table import SequenceTable

LAYERS, SLOTS, MAX_SEGMENT, BLOCKS = 2, 6, 1280, 128
CHANGES: dict[str, Any] = {
    "model_type": "mistral",
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": MAX_SEGMENT,
    "sliding_window": 40,
}


class Tape(TorchDispatchMode):
    """A CUDA graph for a CPU: keeps the operations that some work consists of, and does them again on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[tuple[Callable[[], object], object]] = []

    @classmethod
    def of(cls, work: Work) -> Work:
        with cls() as tape:
            work()
        return tape._replay

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        call = partial(func, *args, **(kwargs or {}))
        result = call()
        self._kept.append((call, result))
        return result

    def _replay(self) -> None:
        for call, before in self._kept:
            for old, new in zip(tensors(before), tensors(call()), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def tensors(result: object) -> list[Tensor]:
    return [part for part in (result if isinstance(result, (list, tuple)) else [result]) if isinstance(part, Tensor)]


def captured(works: list[Work], device: torch.device) -> list[Work]:
    if device.type == "cpu":
        return [Tape.of(work) for work in works]
    return [graph.replay for graph, _ in GraphPool().record(works)]


@pytest.fixture(autouse=True)
def stream(device: torch.device) -> Iterator[None]:
    """Graphs cannot be captured on the default one."""
    with torch.inference_mode(), torch.cuda.stream(None if device.type == "cpu" else torch.cuda.Stream(device)):
        yield


@dataclass
class Rig:
    """Two runners that are given the same steps: one computes them in one go, the other in pieces."""

    whole: Runner
    cut: Runner
    table: SequenceTable
    device: torch.device
    replayed: list[int] = field(default_factory=list)
    """The bucket of each piece that ran since the last step began."""
    _told: SlotTables = field(init=False)
    _free: Iterator[int] = field(default_factory=lambda: iter(torch.randperm(BLOCKS).tolist()))

    def __post_init__(self) -> None:
        self._told = SlotTables(SLOTS, self.whole.max_blocks)

    def capture(self, *, only_largest: bool = False) -> PiecewiseGraphs:
        """Make the pieces; from now on those that run are noted."""
        sizes = reversed(CAPTURE_SIZES)

        def noting(bucket: int, replay: Work) -> None:
            self.replayed.append(bucket)
            replay()

        def record(works: list[Work]) -> list[Work]:
            bucket = next(sizes)
            return [partial(noting, bucket, replay) for replay in captured(works, self.device)]

        return self.cut.capture_pieces(record, only_largest=only_largest)

    def admit(self, slot: int, length: int, new: int = 9) -> NewSequence:
        blocks = tuple(next(self._free) for _ in range(-(-(length + new) // BLOCK_SIZE)))
        prompt = tuple(torch.randint(CONFIG["vocab_size"], (length,)).tolist())
        return NewSequence(slot=slot, prompt=prompt, stopping=Stopping(max_new_tokens=new), blocks=blocks)

    def step(self, orders: Orders, *, greedy: bool = True) -> tuple[ForwardOutput, ForwardOutput, StepPlan]:
        """What is left of one step by either runner, and its plan."""
        assert self.table.apply(orders) == []
        rows = self.table.rows()
        plan = self._plan(rows, greedy)
        self.replayed.clear()
        output, ours = self.whole.start(plan), self.cut.start(plan)
        self.table.begin(rows)
        sampling = [0] * plan.num_sampling if output.sampled is None else output.sampled[: plan.num_sampling].tolist()
        self.table.advance(rows, SamplerOutput(sampling, [0.0] * len(sampling)))
        return output, ours, plan

    def _plan(self, rows: StepRows, greedy: bool) -> StepPlan:
        updates = self._told.updates(rows)
        if rows.prefills:
            return plan_chunks(rows, updates, greedy=greedy)
        return plan_decoding(rows, updates, Padding(len(rows), len(updates), SLOTS, (0, 0)), greedy=greedy)


def make_runner(folder: Path, device: torch.device) -> Runner:
    config = read_model_config(folder)
    weights = ModelWeights(config, TensorParallelRank(), device, torch.float32)
    load_weights(folder, weights.named_parameters())
    weights.process_weights_after_loading()
    shape = CacheShape(LAYERS, weights.num_kv_heads, config.head_dim, device, torch.float32)
    runner = Runner(config, weights, ReferenceOps(config.head_dim), ParallelGroup(TensorParallelRank()), shape, SLOTS)
    runner.allocate(BLOCKS)
    return runner


@pytest.fixture
def rig(tmp_path: Path, device: torch.device) -> Rig:
    torch.manual_seed(5)
    folder = write_checkpoint(tmp_path, random_tensors(CHANGES), CHANGES)
    info = EngineInfo(
        engine="torch",
        model_id="",
        model_type="mistral",
        dtype="float32",
        device=str(device),
        scheduling=Scheduling.STEP,
        vocab_size=CONFIG["vocab_size"],
        max_sequence_length=MAX_SEGMENT,
        max_slots=SLOTS,
        block_size=BLOCK_SIZE,
        eos_token_ids=(),
        suggested_prefill_tokens=MAX_SEGMENT,
        max_top_n_tokens=0,
    )
    table = SequenceTable(info)
    table.num_blocks = BLOCKS
    return Rig(make_runner(folder, device), make_runner(folder, device), table, device)


def error(ours: Tensor, reference: Tensor) -> float:
    assert ours.shape == reference.shape
    return float((ours.double() - reference.double()).norm() / reference.double().norm())


def check(rig: Rig, orders: Orders, bucket: int | None, *, greedy: bool = True) -> None:
    """Both runners leave the same, and the second one took a bucket, or none."""
    reference, ours, plan = rig.step(orders, greedy=greedy)
    assert rig.replayed == ([] if bucket is None else [bucket] * (LAYERS + 1))
    assert error(ours.normed, reference.normed) < 1e-5
    assert (ours.logits is None) == (reference.logits is None) == (plan.num_sampling == 0)
    if reference.logits is not None and ours.logits is not None:
        assert error(ours.logits, reference.logits) < 1e-5
    if reference.sampled is not None and ours.sampled is not None:
        assert ours.sampled[: plan.num_sampling].tolist() == reference.sampled[: plan.num_sampling].tolist()
    for layer, expected in zip(rig.cut._cache, rig.whole._cache, strict=True):
        # All blocks but the scratch block, which padding is written to.
        assert error(layer[:-1], expected[:-1]) < 1e-5
        assert layer[:-1].eq(0).logical_and(expected[:-1].ne(0)).sum() == 0


def test_steps_in_pieces_leave_what_whole_steps_leave(rig: Rig) -> None:
    admit = rig.admit
    rig.capture()
    # A first chunk that fills no bucket, and whose prompt goes on.
    check(rig, Orders(number=1, admit=(admit(0, 60),), prefill=((0, 21),)), 32)
    # Chunks of several sequences, of which one ends its prompt.
    check(rig, Orders(number=2, admit=(admit(1, 7), admit(2, 90)), prefill=((0, 20), (1, 7), (2, 30))), 64)
    # A decoding row beside chunks; exactly a bucket's tokens.
    check(rig, Orders(number=3, prefill=((0, 19), (2, 44))), 64)
    check(rig, Orders(number=4, prefill=((2, 16),)), 32, greedy=False)
    # Decoding alone is not for pieces.
    check(rig, Orders(number=5), None)
    # A long chunk far beyond the window, beside three decoding rows; then the rest of it.
    check(rig, Orders(number=6, admit=(admit(3, 280),), prefill=((3, 260),)), 320)
    check(rig, Orders(number=7, prefill=((3, 20),)), 32)
    # Next to nothing, in memory full of what came before.
    check(rig, Orders(number=8, release=(0, 1, 2, 3), admit=(admit(4, 1),), prefill=((4, 1),)), 16)
    check(rig, Orders(number=9), None)


def test_padding_that_is_not_finite_stays_in_the_padding(rig: Rig) -> None:
    rig.capture(only_largest=True)
    scratch = len(rig.cut._cache[0]) - 1
    for layer in rig.cut._cache:
        layer[scratch] = torch.nan
    check(rig, Orders(number=1, admit=(rig.admit(0, 970),), prefill=((0, 970),)), 1024)
    assert all(layer[scratch, :, :, 0].isfinite().all() for layer in rig.cut._cache)


def test_one_set_is_enough_to_see_what_memory_it_takes(rig: Rig) -> None:
    pieces = rig.capture(only_largest=True)
    assert len(pieces) >= len(CAPTURE_SIZES)
    # Steps that would take another set, or are too large for any, are computed whole.
    check(rig, Orders(number=1, admit=(rig.admit(0, 12),), prefill=((0, 12),)), None)
    check(rig, Orders(number=2, admit=(rig.admit(1, 1025),), prefill=((1, 1025),)), None)


def test_a_new_pool_has_no_pieces_over_the_old_one(rig: Rig) -> None:
    rig.capture(only_largest=True)
    rig.cut.allocate(BLOCKS)
    check(rig, Orders(number=1, admit=(rig.admit(0, 970),), prefill=((0, 970),)), None)


@pytest.mark.parametrize(
    ("tokens", "bucket"),
    [(1, 16), (16, 16), (17, 32), (64, 64), (65, 128), (129, 192), (960, 960), (961, 1024), (1024, 1024)],
)
def test_a_step_takes_the_smallest_bucket_that_it_fits(tokens: int, bucket: int) -> None:
    assert capture_size_for(tokens) == bucket


def test_a_step_of_too_many_tokens_takes_none() -> None:
    assert capture_size_for(CAPTURE_SIZES[-1] + 1) not in CAPTURE_SIZES
