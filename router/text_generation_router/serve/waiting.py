"""Waiting for an event or for a signal to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from text_generation_proto.stop_signals import StopSignals


async def wait_for(event: Coroutine[None, None, None], signals: StopSignals) -> bool:
    """Wait for an event; False after a stop signal."""
    async with asyncio.TaskGroup() as tasks:
        waiting, stopping = tasks.create_task(event), tasks.create_task(signals.stop.wait())
        await asyncio.wait((waiting, stopping), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        stopping.cancel()
    return not signals.stop.is_set()
