"""One client process: plays its part of each level and reports the times of its requests."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from time import perf_counter, process_time

import uvloop

from text_generation_bench.load.dialects import PATHS, AnswerStream, BodyMaker, Prompt, refusal
from text_generation_bench.load.http_client import HttpClient, HttpFailure
from text_generation_bench.load.settings import LoadSettings
from text_generation_bench.load.workload import Level, PlannedChat, Share, Workload
from text_generation_common.one_line import one_line
from text_generation_common.resource_limits import apply_limits
from text_generation_proto.access import client_context

PROGRESS_EVERY_S = 0.25
LAG_EVERY_S = 0.05
OPEN_LOOP_WARM_UPS = 4
"""Requests of one warm-up round of an open loop."""


@dataclass(slots=True)
class RequestTimes:
    """One request as its client saw it. Times are in seconds; start is since that of the level."""

    start: float
    late: float = 0.0
    """Time from the planned start to the real one, in an open loop."""
    ttft: float | None = None
    latency: float = 0.0
    tokens: int = 0
    events: int = 0
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    turn: int = 0
    session: str = ""
    """The session of the agent that sent it."""
    error: str = ""
    is_counted: bool = True
    """The server counted the tokens; else they are events."""


@dataclass(slots=True)
class Progress:
    """Counts of a level so far, and the latest times."""

    done: int = 0
    open: int = 0
    tokens: int = 0
    """Events with tokens; of requests that have ended, their tokens."""
    errors: int = 0
    ttfts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


@dataclass(slots=True)
class ClientReport:
    """The part of a level that one process played."""

    requests: list[RequestTimes]
    tokens_by_second: dict[int, int]
    """Events with tokens, by second since the start of the level."""
    cpu: float
    """Share of one core that the process used."""
    lags: list[float]
    """Delays of the event loop, in seconds."""
    began: float
    """perf_counter() at the first request; it is the same clock in all processes of a machine."""
    ended: float


@dataclass(frozen=True, slots=True)
class Order:
    """A part of a level to play: the warm-up, or the measurement from `start` on."""

    level: Level
    is_warm_up: bool
    start: float = 0.0
    """perf_counter() at which the level starts."""


def tls_context(settings: LoadSettings) -> ssl.SSLContext:
    """Return the TLS settings. Raises OSError for files that cannot be used."""
    context = client_context(settings.tls_ca)
    if settings.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if settings.tls_cert is not None:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    return context


def run_client(settings: LoadSettings, model: str, share: Share, parent: Connection) -> None:
    """Play the orders that come over a pipe until it is closed; the entry point of a process."""
    apply_limits()
    workload = Workload(settings, share)
    tls = tls_context(settings) if settings.url.startswith("https") else None
    bodies = BodyMaker(settings.dialect, model, settings.sampling, settings.extra_body)
    gc.freeze()
    gc.disable()  # a collection would stop all streams; between levels there is time
    try:
        parent.send("ready")
        while True:
            order: Order = parent.recv()
            client = HttpClient(base_url(settings.url), settings.headers, tls, settings.timeout)
            run = _LevelRun(settings, share, client, bodies, parent.send)
            parent.send(uvloop.run(run.play(order, workload)))
            gc.collect()
    except* (EOFError, ConnectionError):
        pass  # the parent has ended


def base_url(url: str) -> str:
    """Return the URL that the paths of the dialects follow: clients of OpenAI are given one that ends with /v1."""
    return url.rstrip("/").removesuffix("/v1")


class _LevelRun:
    """Plays the part of one level that one process has."""

    def __init__(
        self,
        settings: LoadSettings,
        share: Share,
        client: HttpClient,
        bodies: BodyMaker,
        send: Callable[[object], None],
    ) -> None:
        self._settings = settings
        self._share = share
        self._client = client
        self._bodies = bodies
        self._send = send
        self._path = PATHS[settings.dialect]
        self._requests: list[RequestTimes] = []
        self._by_second: Counter[int] = Counter()
        self._progress = Progress()
        self._streams: set[AnswerStream] = set()
        self._lags: list[float] = []
        self._start = 0.0

    async def play(self, order: Order, workload: Workload) -> ClientReport:
        """Play the level to its end."""
        self._start = order.start or perf_counter()
        await asyncio.sleep(max(0.0, self._start - perf_counter()))
        cpu, began = process_time(), perf_counter()
        async with asyncio.TaskGroup() as outer:
            watch = outer.create_task(self._watch())
            try:
                await self._load(order, workload)
            finally:
                watch.cancel()
        ended = perf_counter()
        busy = (process_time() - cpu) / max(ended - began, 1e-9)
        self._client.close()
        return ClientReport(self._requests, dict(self._by_second), busy, self._lags, began, ended)

    async def _load(self, order: Order, workload: Workload) -> None:
        level = order.level
        if order.is_warm_up:
            open_ = OPEN_LOOP_WARM_UPS if level.is_open_loop else int(level.value)
            mine = self._share.of(open_)
            chats = (
                chat for chat, _ in zip(workload.warm_up(level), range(mine * self._settings.warmups), strict=False)
            )
            await self._closed_loop(chats, mine, until=math.inf)
        elif level.is_open_loop:
            await self._open_loop(workload.open(level))
        else:
            until = math.inf if self._settings.duration is None else self._start + self._settings.duration
            await self._closed_loop(workload.closed(level), self._share.of(int(level.value)), until)

    async def _closed_loop(self, chats: Iterator[PlannedChat], open_: int, until: float) -> None:
        async def worker() -> None:
            for chat in chats:
                await self._play_chat(chat, until=until)
                if perf_counter() >= until:
                    return

        async with asyncio.TaskGroup() as tasks:
            for _ in range(open_):
                tasks.create_task(worker())

    async def _open_loop(self, chats: Iterator[PlannedChat]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for chat in chats:
                await asyncio.sleep(max(0.0, self._start + chat.at - perf_counter()))
                tasks.create_task(self._play_chat(chat, planned=self._start + chat.at))

    async def _play_chat(self, chat: PlannedChat, planned: float | None = None, until: float = math.inf) -> None:
        """Play the turns of a chat and of its sub-agents; those that would begin after `until` are left out."""
        turns: list[tuple[Prompt, str]] = []
        for number, (prompt, new_tokens) in enumerate(chat.turns):
            async with asyncio.TaskGroup() as tasks:
                for each in chat.subagents.get(number, ()):
                    tasks.create_task(self._play_chat(each, until=until))
            pause = chat.pauses[number] if chat.pauses else self._settings.think_time * bool(number)
            if perf_counter() + pause >= until:
                return
            await asyncio.sleep(pause)
            if number in chat.resets:
                turns.clear()
            turns.append((prompt, ""))
            body = self._bodies.body(chat.system, turns, new_tokens, chat.session)
            stream = AnswerStream(self._settings.dialect, wants_text=number + 1 < len(chat.turns))
            times = await self._request(body, stream)
            times.turn, times.session = number, chat.session
            if planned is not None and number == 0:
                times.late = times.start + self._start - planned
            if times.error:
                return
            turns[-1] = (prompt, stream.text)

    async def _request(self, body: bytes, stream: AnswerStream) -> RequestTimes:
        self._streams.add(stream)
        started = perf_counter()
        times = RequestTimes(started - self._start)
        try:
            response = await self._client.post(self._path, body, stream.feed)
            if response.status != 200:
                times.error = refusal(response.status, response.error_body)
            elif stream.error:
                times.error = stream.error
            elif not stream.has_ended:
                times.error = (
                    "the stream ended without its last event" if stream.times else "the answer is no stream of tokens"
                )
        except HttpFailure as failure:
            times.error = str(failure)
        self._finish(times, stream, started)
        return times

    def _finish(self, times: RequestTimes, stream: AnswerStream, started: float) -> None:
        times.latency = perf_counter() - started
        times.tokens, times.events = stream.tokens, len(stream.times)
        times.is_counted = stream.usage_tokens is not None
        times.prompt_tokens, times.cached_tokens = stream.prompt_tokens, stream.cached_tokens
        times.error = one_line(times.error)
        stamps = stream.times
        if stamps:
            times.ttft = stamps[0] - started
            times.gaps = [later - earlier for earlier, later in itertools.pairwise(stamps)]
        self._by_second.update(int(stamp - self._start) for stamp in stamps)
        self._requests.append(times)
        self._streams.discard(stream)
        progress = self._progress
        progress.done += 1
        progress.tokens += times.tokens
        progress.errors += bool(times.error)
        if times.ttft is not None and not times.error:
            progress.ttfts.append(times.ttft)
            progress.gaps.extend(times.gaps[:64])

    async def _watch(self) -> None:
        """Measure the delays of the event loop, and report the progress."""
        due = perf_counter() + PROGRESS_EVERY_S
        while True:
            planned = perf_counter() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            now = perf_counter()
            self._lags.append(max(0.0, now - planned))
            if now >= due:
                due = now + PROGRESS_EVERY_S
                progress, tokens = self._progress, sum(len(stream.times) for stream in self._streams)
                self._send(replace(progress, open=len(self._streams), tokens=progress.tokens + tokens))
                progress.ttfts, progress.gaps = [], []
