"""A run: starts the client processes, plays level after level, and gathers the results."""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import perf_counter
from typing import Any

from text_generation_bench.load.client import ClientReport, Order, Progress, run_client
from text_generation_bench.load.measures import level_result
from text_generation_bench.load.search import MAX_LEVELS, found, planned
from text_generation_bench.load.server import describe_server
from text_generation_bench.load.settings import OPEN_LOOP_SECONDS, LoadSettings, fail
from text_generation_bench.load.views import Expected, View
from text_generation_bench.load.workload import Level, Share, levels, read_trace

FORMAT = "text-generation-benchmark 1"
START_AFTER_S = 0.1
"""Time for all processes to read the order of a level, so that they start together."""


class Clients:
    """The client processes."""

    def __init__(self, settings: LoadSettings, model: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: only the parent ends by it
        for index in range(settings.processes):
            ours, theirs = context.Pipe()
            share = Share(index, settings.processes)
            process = context.Process(target=run_client, args=(settings, model, share, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        signal.signal(signal.SIGINT, handler)
        for pipe in self._pipes:
            self._receive(pipe)

    def play(self, order: Order, progress: Callable[[list[Progress]], None]) -> list[ClientReport]:
        """Play a level in all processes and return their reports."""
        for pipe in self._pipes:
            pipe.send(order)
        reports: dict[int, ClientReport] = {}
        parts = [Progress() for _ in self._pipes]
        while len(reports) < len(self._pipes):
            ready = wait([pipe for at, pipe in enumerate(self._pipes) if at not in reports])
            for at, pipe in enumerate(self._pipes):
                if pipe not in ready:
                    continue
                match self._receive(pipe):
                    case ClientReport() as report:
                        reports[at] = report
                    case Progress() as part:
                        parts[at] = part
            progress(parts)
            for part in parts:  # each time is shown once
                part.ttfts, part.gaps = [], []
        return [reports[at] for at in range(len(self._pipes))]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
            process.join()

    def _receive(self, pipe: Connection) -> object:
        try:
            return pipe.recv()
        except EOFError:
            fail("a client process ended; its error is above")


def run(settings: LoadSettings, view_for: Callable[[int], View]) -> dict[str, Any]:
    """Play all levels and return the content of the result file; after an interrupt, that of the levels that ended."""
    server = describe_server(settings)
    began = datetime.now(UTC)
    clients = Clients(settings, settings.model or server["model"])
    results: list[dict[str, Any]] = []
    view = view_for(MAX_LEVELS if settings.search_rate else len(levels(settings)))
    interrupted = False
    try:
        for level in planned(settings, results):
            results.append(_play(settings, clients, view, level))
            if results[-1]["errors"] == results[-1]["requests"] > 0 and not settings.search_rate:
                break
    except KeyboardInterrupt:
        interrupted = True
    finally:
        view.close()
        clients.close()
    return {
        "format": FORMAT,
        "interrupted": interrupted,
        "time": began.isoformat(timespec="seconds"),
        "server": server,
        "environment": _environment(),
        "settings": settings.public() | {"model": settings.model or server["model"]},
        "targets": settings.targets,
        "levels": results,
        **({"search": found(settings, results)} if settings.search_rate else {}),
    }


def _play(settings: LoadSettings, clients: Clients, view: View, level: Level) -> dict[str, Any]:
    if settings.warmups:
        view.begin(level, Expected(None, None), is_warm_up=True)
        requests = [
            request
            for report in clients.play(Order(level, is_warm_up=True), view.progress)
            for request in report.requests
        ]
        if requests and all(request.error for request in requests):
            view.close()
            fail(f"all {len(requests)} requests of the warm-up failed, the first with: {requests[0].error}")
    view.begin(level, expected(settings, level), is_warm_up=False)
    order = Order(level, is_warm_up=False, start=perf_counter() + START_AFTER_S)
    result = level_result(level, clients.play(order, view.progress), settings.targets)
    view.finish(result)
    return result


def expected(settings: LoadSettings, level: Level) -> Expected:
    """Return the requests of a level as far as they are known, else its seconds."""
    chats: int | None
    if settings.scenario:
        return Expected(None, settings.duration)
    if settings.trace is not None:
        chats = settings.requests or len(read_trace(settings))
    elif settings.requests:
        chats = settings.requests
    elif level.is_open_loop or settings.duration:
        return Expected(None, settings.duration or OPEN_LOOP_SECONDS)
    else:
        chats = settings.runs * int(level.value)
    turns_vary = settings.dataset is not None and settings.turns > 1
    return Expected(None if turns_vary else chats * settings.turns, settings.duration)


def _environment() -> dict[str, Any]:
    return {
        "client": version("text-generation-trtllm"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
    }
