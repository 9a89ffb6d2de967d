"""The policies that are compared, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from text_generation_bench.simulator.machine import Machine
from text_generation_router.scheduling.policy import Dispatch, Policy


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy, and what the front door does beside it."""

    policy: Policy
    blind: bool = False
    """Whether it knows nothing of tenants, classes and deadlines."""


def _ours(machine: Machine, most_queued: int | None) -> Contender:
    return Contender(
        Policy(
            max_batch_prefill_tokens=machine.prefill_budget,
            max_batch_size=machine.slots,
            target_itl_s=machine.target_itl_s,
            max_queued_tokens=most_queued,
            growth_tokens=machine.growth_tokens,
        )
    )


def _but(**changes: object) -> Callable[[Machine, int | None], Contender]:
    """Ours, but for `changes` of its policy."""

    def build(machine: Machine, most_queued: int | None) -> Contender:
        ours = _ours(machine, most_queued)
        return replace(ours, policy=replace(ours.policy, **changes))  # type: ignore[arg-type]

    return build


def _fcfs(machine: Machine, most_queued: int | None) -> Contender:
    return replace(_ours(machine, most_queued), blind=True)


def _tgi(machine: Machine, most_queued: int | None) -> Contender:
    ours = _ours(machine, most_queued).policy
    policy = replace(
        ours,
        target_itl_s=None,
        dispatch=Dispatch.ROUND_ROBIN,
        reserve_worst_case=True,
        publish_prompts_only=True,
    )
    return Contender(policy, blind=True)


POLICIES: Mapping[str, Callable[[Machine, int | None], Contender]] = MappingProxyType(
    {
        "ours": _ours,
        "no-reuse": _but(prefix_caching=False),
        "no-target": _but(target_itl_s=None),
        "fcfs": _fcfs,
        "least-loaded": _but(dispatch=Dispatch.LEAST_LOADED),
        "round-robin": _but(dispatch=Dispatch.ROUND_ROBIN),
        "random": _but(dispatch=Dispatch.RANDOM),
        "tgi": _tgi,
    }
)
"""By name, made for a machine and for so many tokens of work that may wait."""
