"""One case in three acts: normal, fault, recovery; and the judgement."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from faults import Case, Target
from server import Server, until
from traffic import Traffic, generation, long_prompt

NORMAL_WINDOWS = 2
WINDOW_S = 2.0
SAME = 0.9
"""Share of the normal requests per second from which on the server counts as recovered."""
RECOVERY_S = 25.0
"""Seconds to recover: a shard is restarted within 20, and one more window is measured."""
EXIT_S = 40.0
"""Seconds after a fault until a server that has to end has ended: the hang timeout, and the streams that finish."""
STREAMS = 8
STREAM_TOKENS = 300


@dataclass
class Result:
    """The outcome of a case."""

    case: Case
    normal: float = 0.0
    """Requests finished per second before the fault, in the slowest window: other work on the machine costs some, too."""
    recovered: float = 0.0
    recovery_s: float = 0.0
    ends: Counter[str] = field(default_factory=Counter)
    exit_code: int | None = None
    problems: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    """The last lines of a server with problems."""


class Runner:
    """Runs cases. A server that a case left as it was serves the next one."""

    def __init__(self, model: Path, hang_token: int, session: aiohttp.ClientSession) -> None:
        self._model = model
        self._hang_token = hang_token
        self._session = session
        self._server: Server | None = None
        self._normal = 0.0
        """Rate of the last normal act: that of a case in the phase `load`."""

    async def run(self, case: Case, seed: str) -> Result:
        """Run one case and judge it."""
        result = Result(case, self._normal)
        if case.phase == "load" or case.fault.log_to_file or self._server is None:
            await self._replace_server(case)
        assert self._server is not None
        act = Act(case, self._server, self._session, random.Random(f"{seed} {case}"), result)
        try:
            if case.phase == "load":
                await act.load()
            elif await self._server.is_ready(self._session):
                await act.serve()
                self._normal = result.normal
            else:
                result.problems.append("the server does not start")
        except TimeoutError:
            result.problems.append("the case does not end")
        if result.exit_code is not None and not result.problems:
            await self._replace_server(case)
            await self._start_again(result)
        if result.problems:
            result.log = self._server.last_lines()
        if result.problems or case.fault.spoils or case.fault.log_to_file:
            await self.close()
        return result

    async def close(self) -> None:
        """Stop the server, if there is one."""
        if self._server is not None:
            await asyncio.to_thread(self._server.close)
            self._server = None

    async def _replace_server(self, case: Case) -> None:
        await self.close()
        self._server = Server(self._model, self._hang_token, log_to_file=case.fault.log_to_file)

    async def _start_again(self, result: Result) -> None:
        """Recover from the end of the server: the next one serves as the last one did."""
        assert self._server is not None
        if not await self._server.is_ready(self._session):
            result.problems.append("the server does not start again")
            return
        async with asyncio.TaskGroup() as tasks:
            traffic = Traffic(self._session, tasks, self._server.url)
            traffic.start_loop()
            await recover(traffic, result)
            await traffic.all_ended()


async def recover(traffic: Traffic, result: Result) -> None:
    """Measure until the server is as fast as before the fault."""
    started = time.monotonic()
    while (elapsed := time.monotonic() - started) < RECOVERY_S:
        result.recovered = max(result.recovered, await traffic.rate(WINDOW_S))
        if result.recovered >= SAME * result.normal and result.recovered > 0:
            result.recovery_s = elapsed
            return
    result.problems.append(f"{result.recovered:.0f} requests/s after {RECOVERY_S:.0f} s, {result.normal:.0f} before")


@dataclass
class Act:
    """One case on one server."""

    case: Case
    server: Server
    session: aiohttp.ClientSession
    draw: random.Random
    result: Result

    async def load(self) -> None:
        """Inject the fault while the server starts."""
        async with asyncio.TaskGroup() as tasks:
            traffic = Traffic(self.session, tasks, self.server.url)
            if not await until(lambda: bool(self.server.roles()[self.case.role]), 60):
                self.result.problems.append(f"there is no {self.case.role}")
                return
            await asyncio.sleep(self.draw.random())
            await self._hit(traffic)
            ready = await self.server.is_ready(self.session)
            if await self._survives():
                if not ready:
                    self.result.problems.append("the server does not start")
                traffic.start_loop()
                await recover(traffic, self.result)
                await traffic.all_ended()
            self._judge_streams(traffic)

    async def serve(self) -> None:
        """Measure, inject the fault in its phase, and measure again."""
        await until(self.server.is_whole, 10)
        async with asyncio.TaskGroup() as tasks:
            traffic = Traffic(self.session, tasks, self.server.url)
            traffic.start_loop()
            await traffic.rate(1.0)
            self.result.normal = min([await traffic.rate(WINDOW_S) for _ in range(NORMAL_WINDOWS)])
            await traffic.all_ended()
            self.server.remember()
            await self._enter_phase(traffic)
            await self._hit(traffic)
            if await self._survives():
                if self.case.phase == "idle":
                    traffic.start_loop()
                await recover(traffic, self.result)
            await traffic.all_ended()
            self._judge_streams(traffic)
        self.server.stop_client()
        if self.result.exit_code is None:
            self.result.problems += await self.server.leaks(self.session)

    async def _enter_phase(self, traffic: Traffic) -> None:
        """Return when the server does the work of the phase."""
        phase = self.case.phase
        if self.case.role == "client":
            await asyncio.to_thread(self.server.start_client, phase)
        if phase == "idle":
            return
        traffic.start_loop()
        long = phase == "prefill"
        streams = [
            traffic.open(generation(STREAM_TOKENS, long_prompt()) if long else generation(STREAM_TOKENS))
            for _ in range(STREAMS)
        ]
        if long:
            await asyncio.sleep(self.draw.uniform(0.2, 0.5))
            return
        for stream in streams:
            await stream.started.wait()
        if phase == "drain":
            self.server.launcher.send_signal(signal.SIGTERM)
            await asyncio.sleep(self.draw.uniform(0.2, 1.0))

    async def _hit(self, traffic: Traffic) -> None:
        """Inject the fault and end it."""
        processes = self.server.roles()[self.case.role]
        if not processes:
            self.result.problems.append(f"there is no {self.case.role}")
            return
        target = Target(self.server, traffic, self.case.role, self.draw.choice(processes))
        fault = self.case.fault
        fault.inject(target)
        await until(lambda: self.server.launcher.poll() is not None or not target.process.is_running(), fault.seconds)
        if fault.name.startswith("model"):
            await asyncio.sleep(fault.seconds)
        fault.end(target)

    async def _survives(self) -> bool:
        """Return True if the server serves on; judge its end if it does not, or must not."""
        case, launcher = self.case, self.server.launcher
        if not case.may_survive or (case.exit_codes and launcher.poll() is not None):
            await until(lambda: launcher.poll() is not None, EXIT_S)
        if (code := launcher.poll()) is None:
            if not case.may_survive:
                self.result.problems.append(f"the server did not end in {EXIT_S:.0f} s")
            return case.may_survive
        self.result.exit_code = code
        if code not in case.exit_codes:
            self.result.problems.append(f"exit code {code}, not one of {sorted(case.exit_codes)}")
        self.result.problems += await self.server.remains()
        return False

    def _judge_streams(self, traffic: Traffic) -> None:
        self.result.ends = traffic.ends()
        for end, number in self.result.ends.items():
            if not any(end.startswith(allowed) for allowed in self.case.ends):
                self.result.problems.append(f"{number} x {end}")
