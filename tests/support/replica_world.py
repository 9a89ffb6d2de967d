"""ReplicaWorld: a replica as the scheduler sees it, with a network that delays or loses messages and an echo engine.

It follows `session.Session` without its thread: a boundary applies at most one set of orders, the report of a step leaves
after the next boundary, and a step without results is not reported.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from checked_echo import CheckedEcho
from host_ledger import HostBlocks
from self_scheduling_echo import SelfSchedulingEcho

from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.values import Stopping
from text_generation_router.scheduling.messages import Placement, ReplicaSpec, SchedulerOutput, StepOutput
from text_generation_shard import engine as shard
from text_generation_shard.config import ShardConfig

BLOCK_SIZE = 16
EOS = 7
FAILING_TOKEN = 8
FAILING_STEP_TOKEN = 9


@dataclass(frozen=True)
class ReplicaSetup:
    """The configuration of a replica."""

    blocks: int
    slots: int
    self_scheduling: bool = False
    reserves_max_length: bool = False
    tokens_per_report: int = 1
    max_batch_size: int = 8
    max_batch_prefill_tokens: int = 64
    adapters: str = ""
    max_loras: int = 0
    further_groups: tuple[CacheGroup, ...] = ()
    host: HostBlocks | None = None


class ReplicaWorld:
    """One session of a replica."""

    def __init__(self, setup: ReplicaSetup, engine: shard.Engine | None = None) -> None:
        """Drive `engine`, or an echo engine."""
        self.setup = setup
        config = ShardConfig(
            engine="echo",
            max_batch_size=setup.slots,
            lora_adapters=setup.adapters,
            max_loras=setup.max_loras,
        )
        faults = {"fail_token": FAILING_TOKEN, "fail_step_token": FAILING_STEP_TOKEN}
        self.engine: shard.Engine = engine or (
            SelfSchedulingEcho.build(config, setup.tokens_per_report, **faults)
            if setup.self_scheduling
            else CheckedEcho.build(config, **faults, further_groups=setup.further_groups, host=setup.host)
        )
        limits = shard.WarmUpLimits(setup.max_batch_prefill_tokens, setup.max_batch_size, setup.blocks * BLOCK_SIZE)
        first, *further = self.engine.warm_up(limits)
        assert first.num_blocks == setup.blocks
        self.spec = ReplicaSpec(
            setup.slots,
            setup.blocks,
            BLOCK_SIZE,
            setup.self_scheduling,
            setup.reserves_max_length,
            adapters=self.engine.info.adapters,
            max_loras=self.engine.info.max_loras,
            further_groups=tuple(further),
            host_cache="host" if first.host_blocks else "",
            host_blocks=first.host_blocks,
            tokens_per_step=max(1, self.engine.info.max_tokens_per_step),
        )
        self.sent: deque[SchedulerOutput] = deque()
        self.inbox: deque[SchedulerOutput] = deque()
        self.reports: deque[StepOutput] = deque()
        self.logprobs: deque[list[float]] = deque()
        """The log-probabilities of the tokens of each report."""
        self.applied = 0
        self._result: shard.StepResult | None = None
        self._busy_s, self._steps = 0.0, 0

    @property
    def is_quiet(self) -> bool:
        """True if no message is under way and the shard has nothing to report."""
        return not (self.sent or self.inbox or self.reports or self._result)

    def orders_arrive(self) -> None:
        """Let all orders sent so far reach the shard."""
        self.inbox += self.sent
        self.sent.clear()

    def boundary_and_step(self) -> None:
        """Apply at most one set of orders, report, and make one step."""
        orders = self.inbox.popleft() if self.inbox else None
        if orders is not None:
            refused = self.engine.apply(_for_shard(orders, self.engine))
            assert not refused, refused
            self.applied = orders.number
            self._result = self._result or shard.StepResult()
        if self._result is not None and (orders is not None or not self._result.is_silent):
            self.reports.append(self._step_output(self._result))
            self.logprobs.append(list(self._result.logprobs))
            self._busy_s, self._steps = 0.0, 0
        self._result = self.engine.step()
        if self._result is not None:
            prefilled = sum(tokens for _, tokens in self._result.prefilled)
            self._busy_s += 0.001 + 0.0001 * prefilled + 0.0001 * len(self._result.slots)
            self._steps += 1

    def _step_output(self, result: shard.StepResult) -> StepOutput:
        return StepOutput(
            orders_applied=self.applied,
            slots=list(result.slots),
            token_counts=list(result.token_counts),
            token_ids=list(result.token_ids),
            finished=dict(result.finished),
            failed={failure.slot: (failure.code, failure.message) for failure in result.failed},
            prefilled=list(result.prefilled),
            step_s=self._busy_s,
            steps=max(1, self._steps),
            copied=result.copied,
        )


def _for_shard(orders: SchedulerOutput, engine: shard.Engine) -> shard.Orders:
    return shard.Orders(
        number=orders.number,
        release=orders.release,
        placements=tuple(_new_sequence(placement, engine) for placement in orders.placements),
        allocations=orders.allocations,
        further_allocations=orders.further_allocations,
        prefill=orders.prefill,
        copies=orders.copies,
    )


def _new_sequence(placement: Placement, engine: shard.Engine) -> shard.NewSequence:
    request, generated = placement.request, placement.generated
    matcher = None
    if request.grammar is not None and engine.grammars is not None:
        matcher = engine.grammars.build(request.grammar, generated)
        matcher.result()
    return shard.NewSequence(
        slot=placement.slot,
        prompt=(*request.prompt, *generated),
        generated_tokens=len(generated),
        blocks=placement.blocks,
        computed_tokens=placement.cached_tokens,
        further_blocks=placement.further_blocks,
        stopping=Stopping(
            max_new_tokens=request.max_new_tokens - len(generated),
            eos_token_ids=frozenset() if request.ignore_eos else frozenset((EOS,)),
        ),
        sampling=request.sampling,
        grammar=request.grammar if matcher else None,
        matcher=matcher,
        logprobs=replace(request.logprobs, prompt=request.logprobs.prompt and not generated),
        adapter=request.adapter,
    )
