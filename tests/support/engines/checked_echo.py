"""The echo engine of the tests: it checks the KV blocks that it is given, and fails on request.

The entry point beside this file makes it the engine `echo` of each process with this folder on its path. A process reads its
options, the arguments of `build`, from the environment variable OPTIONS.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Self

from host_ledger import HostBlocks, HostLedger
from kv_ledger import KVLedger, StateLedger, WindowLedger

from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.values import FailureCode, WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, Failure, NewSequence, Orders, StepResult
from text_generation_shard.engines.echo import BLOCK_SIZE, EchoEngine
from text_generation_shard.step.masks import Mask
from text_generation_shard.step.sequence import SamplerOutput, Sequence

OPTIONS = "CHECKED_ECHO"
"""The environment variable with options, as JSON."""


@dataclass
class CheckedEcho(EchoEngine):
    """The echo engine with a ledger of its KV blocks, and tokens at which it fails."""

    fail_token: int = -1
    """A sequence fails when it would repeat this token."""
    fail_step_token: int = -1
    """A whole step fails when a sequence in it would repeat this token."""
    hang_token: int = -1
    """A step never ends when a sequence would repeat this token, unless it has new tokens from another replica."""
    further_groups: tuple[CacheGroup, ...] = ()
    """The groups of its KV cache after the first."""
    host: HostBlocks | None = None
    """The host cache."""
    _host_ledger: HostLedger = field(init=False)
    _ledger: KVLedger = field(init=False)
    _further_ledgers: list[WindowLedger | StateLedger] = field(init=False, default_factory=list)
    _step_fails: bool = field(init=False, default=False)

    @classmethod
    def build(cls, config: ShardConfig, **faults: object) -> Self:
        engine = super().build(config)
        for name, token in faults.items():
            setattr(engine, name, token)
        return engine

    def __post_init__(self) -> None:
        super().__post_init__()
        self._ledger = KVLedger(0, BLOCK_SIZE)

    def warm_up(self, limits: WarmUpLimits) -> tuple[CacheGroup, ...]:
        self.table.groups = (*super().warm_up(limits), *self.further_groups)
        if self.host is not None:
            groups = zip(self.table.groups, self.host.numbers, strict=True)
            self.table.groups = tuple(replace(group, host_blocks=number) for group, number in groups)
        self._reset_ledgers()
        return self.table.groups

    def _reset_ledgers(self) -> None:
        self._ledger = KVLedger(self.num_blocks, BLOCK_SIZE)
        numbered = enumerate(self.further_groups, 1)
        self._further_ledgers = [
            StateLedger(group) if group.is_state else WindowLedger(number, group, BLOCK_SIZE)
            for number, group in numbered
        ]
        self._host_ledger = HostLedger(self.host or HostBlocks(), (self._ledger, *self._further_ledgers))

    def _check_further(self) -> None:
        for ledger in self._further_ledgers:
            problem = ledger.record(self.table.sequences.values())
            assert problem is None, problem

    def apply(self, orders: Orders) -> list[Failure]:
        failed = super().apply(Orders(orders.number, release=orders.release))
        self._ledger.end_dropped()
        for new in orders.placements:
            failed += self._place_checked(new)
        for slot, blocks in orders.allocations:
            failed += self._allocate_checked(slot, blocks)
        further = orders.further_allocations
        failed += super().apply(Orders(orders.number, prefill=orders.prefill, further_allocations=further))
        self._check_further()
        for copy in orders.copies:
            self._host_ledger.begin(copy)
        return failed

    def _place_checked(self, new: NewSequence) -> list[Failure]:
        failed = super().apply(Orders(0, placements=(new,)))
        self._ledger.end_dropped()
        if failed:
            return failed
        if problem := self._ledger.new_sequence_problem(new):
            return self._refuse(new.slot, problem)
        self._ledger.admit(self.table.sequences[new.slot])
        return []

    def _allocate_checked(self, slot: int, blocks: tuple[int, ...]) -> list[Failure]:
        if (sequence := self.table.sequences.get(slot)) is None:
            return []
        if problem := self._ledger.allocation_problem(blocks):
            return self._refuse(slot, problem)
        if failed := super().apply(Orders(0, allocations=((slot, blocks),))):
            return failed
        self._ledger.allocate(sequence, blocks)
        return []

    def _refuse(self, slot: int, problem: str) -> list[Failure]:
        super().apply(Orders(0, release=(slot,)))
        self._ledger.end_dropped()
        return [Failure(slot, FailureCode.INVALID, problem)]

    def step(self) -> StepResult | None:
        result = super().step()
        self._check_further()
        if result is not None and self._step_fails:
            # Those of its sequences that only computed a part of their prompt fail too.
            held = [slot for slot, _ in result.prefilled if slot in self.table.sequences]
            super().apply(Orders(0, release=tuple(held)))
            result.failed += [Failure(slot, FailureCode.STEP, "the step failed") for slot in held]
            result.prefilled = []
        if copied := self._host_ledger.ended():
            result = result or StepResult()
            result.copied = copied
        return result

    def sample(self, sequences: list[Sequence], masks: dict[int, Mask]) -> SamplerOutput:
        output = super().sample(sequences, masks)
        if any(self.table.sequences.get(each.slot) is not each or each.replay is not None for each in sequences):
            return output  # a replay
        self._step_fails = self.fail_step_token in output.token_ids
        for index, (sequence, token) in enumerate(zip(sequences, output.token_ids, strict=True)):
            if token == self.hang_token and not sequence.generated_before:
                threading.Event().wait()
            elif self._step_fails:
                output.failures[index] = (FailureCode.STEP, "the step failed")
            elif token == self.fail_token:
                output.failures[index] = (FailureCode.NUMERICS, "this token fails")
        return output

    def reset(self) -> None:
        super().reset()
        self._host_ledger.close()
        self._reset_ledgers()


@dataclass
class RecordingEcho(CheckedEcho):
    """Keeps the sequences that it was given."""

    placements: list[NewSequence] = field(init=False, default_factory=list)

    def apply(self, orders: Orders) -> list[Failure]:
        self.placements += orders.placements
        return super().apply(orders)


def recording(**info: object) -> Callable[[ShardConfig], RecordingEcho]:
    """Return how to build a RecordingEcho that tells these values in its `Info`."""

    def build(config: ShardConfig) -> RecordingEcho:
        engine = RecordingEcho.build(config)
        engine.info = replace(engine.info, **info)
        return engine

    return build


def build(config: ShardConfig) -> Engine:
    """Build the engine with the options of this process: faults, and `tokens_per_report` of one that schedules for itself."""
    options: dict[str, int] = json.loads(os.environ.get(OPTIONS, "{}"))
    if "tokens_per_report" not in options:
        return CheckedEcho.build(config, **options)
    from self_scheduling_echo import SelfSchedulingEcho

    return SelfSchedulingEcho.build(config, **options)


def failing_at(token: int) -> Callable[[ShardConfig], Engine]:
    """Return how to build the engine whose sequences fail at `token`."""
    return partial(CheckedEcho.build, fail_token=token)


def environ(**options: int) -> dict[str, str]:
    """Return the environment of a process with this engine."""
    return {"PYTHONPATH": str(Path(__file__).parent), OPTIONS: json.dumps(options)}
