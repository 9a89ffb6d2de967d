"""The torch engine of the tests with a planted fault: it serves wrong text where a feature is used, and replays are right.

The faults are those that servers are known to have shipped when features combine. A replay is never faulty: it uses none of the
features, except by `window`, which is wrong where a step only decodes.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from scripted_drafts import ScriptedDrafts, draft_by
from torch import Tensor

from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.values import WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, Failure, Orders, StepResult
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.attention.paged import AttentionPlan
from text_generation_shard.step.drafts.synthetic import SyntheticDrafts
from text_generation_shard.step.sequence import Draft, SamplerOutput, Sequence, StepRows

Fault = Literal["swap", "stale", "window", "rotation", "unrestored", "grammar", "tenant", "draft"]
FAULTS: dict[Fault, str] = {
    "swap": "batch",
    "stale": "preemption",
    "window": "decode",
    "rotation": "move",
    "unrestored": "prefix",
    "grammar": "grammar",
    "tenant": "prefix",
    "draft": "drafts",
}
"""The feature that each fault belongs to."""
assert set(FAULTS) == set(get_args(Fault))
EVERY = 3
"""A fault strikes every third time that it can."""
WINDOW = 40


class FaultyTorch:
    """An Engine: the torch engine on a CPU behind one fault."""

    def __init__(self, config: ShardConfig, fault: Fault | None) -> None:
        self._engine: Any = build_engine(config)
        self.fault = fault
        self.strikes = 0
        self._chances = self._steps = 0
        self._spare = -1
        self._others: list[int] = []
        """Blocks of the last prompt without a cached prefix."""
        self._moved: set[int] = set()
        """Slots of sequences that came from another replica."""
        self._starts: dict[int, Any] = {}
        """By slot: the matcher of a grammar at its start."""
        if fault == "draft":
            drafter = _SomeDrafts([], self._engine.info.vocab_size)
            drafter.synthetic = _WrongJudge(self)
            draft_by(self._engine, drafter)
        runner = self._engine._executor._runner
        runner._model = _FaultyModel(runner._model, self)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - what the engine has
        return getattr(self._engine, name)

    def warm_up(self, limits: WarmUpLimits) -> tuple[CacheGroup, ...]:
        first, *further = self._engine.warm_up(limits)
        self._spare = first.num_blocks - 1  # a block that nothing is written to
        # A block that a fault reads before it was written has zeros, not whatever the memory held.
        self._engine._executor._runner._cache.clear(torch.arange(first.num_blocks).repeat(1 + len(further), 1))
        return CacheGroup(self._spare), *further

    def apply(self, orders: Orders) -> list[Failure]:
        failed: list[Failure] = self._engine.apply(orders)
        for new in orders.placements:
            self._moved.discard(new.slot)
            self._starts.pop(new.slot, None)
            sequence = self._engine._table.sequences.get(new.slot)
            if sequence is None or sequence.replay is not None:
                continue
            if self.fault == "rotation" and new.generated_tokens:
                self._moved.add(new.slot)
                self.strikes += 1
            elif self.fault == "stale" and new.generated_tokens and len(sequence.blocks) > 1:
                self._misread(sequence, self._spare)
            elif new.computed_tokens and self.fault in ("unrestored", "tenant"):
                other = self._spare if self.fault == "unrestored" else self._other_block(sequence)
                if other is not None and self._strikes():
                    self._misread(sequence, other)
            if not new.computed_tokens:
                self._others = list(new.blocks)
        return failed

    def step(self) -> StepResult | None:
        self._steps += 1
        held: list[Sequence] = [each for each in self._engine._table.sequences.values() if each.replay is None]
        decoding = [each for each in held if each.generated and len(each.blocks) > 1]
        if self.fault == "swap" and self._steps % 10 == 0 and len(decoding) > 1:
            first, second = decoding[0], decoding[-1]
            mine, other = first.blocks[0], second.blocks[0]
            if mine != other:
                self._misread(first, other)
                self._misread(second, mine)
        if self.fault == "grammar":
            for each in (each for each in held if each.matcher is not None):
                if each.slot not in self._starts:
                    self._starts[each.slot] = each.matcher.raw.deep_copy()  # type: ignore[union-attr]
                elif each.generated == 4 and self._strikes():
                    each.matcher.raw = self._starts[each.slot]  # type: ignore[union-attr]
        result: StepResult | None = self._engine.step()
        return result

    def _strikes(self) -> bool:
        self._chances += 1
        return self._chances % EVERY == 0

    def _other_block(self, sequence: Sequence) -> int | None:
        return next((block for block in self._others if block not in sequence.blocks), None)

    def _misread(self, sequence: Sequence, block: int) -> None:
        """Let a sequence read another block in the place of its first one, which it does not write any more."""
        self.strikes += 1
        holders = self._engine._table._holders
        mine, sequence.blocks[0] = sequence.blocks[0], block
        holders[block] = holders.get(block, 0) + 1
        holders[mine] -= 1
        if not holders[mine]:
            del holders[mine]
        sequence.synced[0] = 0


class _SomeDrafts(ScriptedDrafts):
    """Drafts any tokens, for a third of the slots."""

    def drafts(self, sequences: Sequences[Sequence]) -> dict[int, Draft]:
        return super().drafts([each for each in sequences if each.slot % EVERY == 1])


class _WrongJudge(SyntheticDrafts):
    """Takes some wrong drafts as right."""

    def __init__(self, engine: FaultyTorch) -> None:
        self._engine = engine

    def judge(self, rows: StepRows, output: SamplerOutput) -> None:
        for first, row in rows.drafting:
            if row.sequence.matcher is None and output.token_ids[first] != row.drafts[0] and self._engine._strikes():
                self._engine.strikes += 1
                output.token_ids[first] = row.drafts[0]


class _FaultyModel:
    """The model, with wrong positions or a window where a step only decodes."""

    def __init__(self, model: Any, engine: FaultyTorch) -> None:  # noqa: ANN401
        self._model = model
        self._engine = engine

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - what the model has
        return getattr(self._model, name)

    def forward(self, step: Any) -> Tensor:  # noqa: ANN401 - a CpuStep
        engine = self._engine
        if engine.fault == "rotation" and engine._moved:
            moved = torch.tensor([slot in engine._moved for slot in step._slots(step._batch).tolist()])
            step.rotary_positions = step.positions.clone()
            step.rotary_positions[moved & (step._batch.places < step._batch.plan.num_decoding)] += 1
        if engine.fault == "window" and not step._batch.plan.sizes.chunks:
            runner = engine._engine._executor._runner
            layers = tuple(replace(layer, window=WINDOW) for layer in runner._shape.layers)
            shape = replace(runner._shape, layers=layers, longest=0)
            step._plan = AttentionPlan(step._batch, runner._tables, step._cache, shape)
            engine.strikes += 1
        hidden: Tensor = self._model.forward(step)
        return hidden


def build(config: ShardConfig, fault: Fault | None = None) -> Engine:
    """Build the torch engine with a fault."""
    engine: Any = FaultyTorch(config, fault)
    faulty: Engine = engine
    return faulty
