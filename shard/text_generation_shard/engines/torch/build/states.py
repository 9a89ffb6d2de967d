"""The number of sequences whose states fit, for models with layers that keep some."""

from __future__ import annotations

from dataclasses import replace

import structlog

from text_generation_shard.engine import EngineError, EngineInfo

STATES_FRACTION = 0.25
"""Largest share of the usable memory that the states of layers with a state take."""

log = structlog.get_logger()


def with_states(info: EngineInfo, bytes_each: int, memory: int) -> EngineInfo:
    """Return the description of an engine that keeps states of `bytes_each` for each slot, with as many slots as have memory.

    slots = STATES_FRACTION · memory / bytes_each − 1: one more is that of padding. Raises EngineError.
    """
    slots = int(memory * STATES_FRACTION) // bytes_each - 1
    if slots < 1:
        raise EngineError(f"the states of two sequences take {2 * bytes_each / 2**30:.1f} GiB of memory")
    if slots < info.max_slots:
        log.info("the memory of states bounds the number of sequences", sequences=slots)
    return replace(info, max_slots=min(slots, info.max_slots), keeps_states=True, max_tokens_per_step=0)
