"""The harm that an attack does: a stream and a probe beside it, and the time to the first token of another tenant."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil

SLACK = 1 if os.environ.get("TEST_FULL") else 4
"""The limits hold on an idle machine (`make attack`). Beside other tests they only find an event loop that stands still."""
LONGEST_GAP_S = 0.1 * SLACK
SLOWEST_PROBE_S = 0.05 * SLACK
"""Limit for 99 of 100 probes."""
TRIES = 3
"""An attack counts as harmful only if each try is: other processes take the cores, too."""


def percentile(values: Sequence[float], share: float = 0.99) -> float:
    """The value that this share of the values does not exceed."""
    return sorted(values)[int(share * (len(values) - 1))]


@dataclass
class Beside:
    """A stream and a probe that run beside an attack."""

    gaps: list[float] = field(default_factory=list)
    probes: list[float] = field(default_factory=list)

    @property
    def harm(self) -> str | None:
        """A description of the harm, or None."""
        gap, probe = max(self.gaps, default=0.0), sorted(self.probes)[int(0.99 * len(self.probes))]
        # Of fewer than 100 probes this is the slowest one.
        if gap < LONGEST_GAP_S and probe < (SLOWEST_PROBE_S if len(self.probes) >= 100 else LONGEST_GAP_S):
            return None
        return str(self)

    def __str__(self) -> str:
        return f"longest gap {max(self.gaps, default=0.0):.3f} s, probe p99 {percentile(self.probes):.3f} s"


def waited_for_a_core(processes: Iterable[psutil.Process]) -> float:
    """Seconds that the main threads of these processes and of this one waited for a core (Linux)."""
    pids = [os.getpid(), *(process.pid for process in processes)]
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) for pid in pids) / 1e9


@asynccontextmanager
async def beside(
    url: str, processes: Sequence[psutil.Process], headers: Mapping[str, str] | None = None
) -> AsyncIterator[Beside]:
    """Run a stream and a probe while the block runs."""
    measured = Beside()

    async def stream(session: aiohttp.ClientSession) -> None:
        body = {"inputs": "one two three", "parameters": {"max_new_tokens": 2000}}
        while True:
            async with session.post(f"{url}/generate_stream", json=body) as response:
                assert response.status == 200, await response.text()
                last = None
                async for _ in response.content.iter_any():
                    now = time.perf_counter() - waited_for_a_core(processes)
                    if last is not None:
                        measured.gaps.append(now - last)
                    last = now

    async def probe(session: aiohttp.ClientSession) -> None:
        while True:
            start = time.perf_counter() - waited_for_a_core(processes)
            async with session.get(f"{url}/health") as response:
                await response.read()
            measured.probes.append(time.perf_counter() - waited_for_a_core(processes) - start)
            await asyncio.sleep(0.005)

    async with aiohttp.ClientSession(headers=headers) as session, asyncio.TaskGroup() as tasks:
        running_beside = [tasks.create_task(stream(session)), tasks.create_task(probe(session))]
        while not (measured.gaps and measured.probes):  # noqa: ASYNC110 - the first token has no event
            await asyncio.sleep(0.01)
        yield measured
        for task in running_beside:
            task.cancel()
