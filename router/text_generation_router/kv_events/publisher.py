"""KvEventsPublisher: events of the prefix caches on a ZeroMQ socket, as vLLM publishes them and llm-d and Dynamo read them.

A message has three parts: the topic; the number of the batch, 8 bytes; and [time, events, rank] as MessagePack. A subscriber that missed
some sends the number of the first to the replay endpoint, and gets (number, batch) for each that is kept; the number -1 is the end.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from itertools import count

import msgspec
import zmq

from text_generation_common.exit_codes import CannotServe
from text_generation_router.kv_events.events import KvEvents
from text_generation_router.kv_events.settings import KvEventsConfig
from text_generation_router.scheduling.scheduler import Scheduler

EVERY_S = 0.05
"""Seconds between two batches."""
END = (-1).to_bytes(8, "big", signed=True)


class KvEventsPublisher:
    """Publishes the events of one scheduler."""

    def __init__(self, config: KvEventsConfig, scheduler: Scheduler) -> None:
        """Open the sockets. Raises CannotServe."""
        self._scheduler = scheduler
        self._topic = config.topic.encode()
        self._events = KvEvents()
        self._numbers = count()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._publish, self._replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self._publish.set_hwm(config.hwm)
        try:
            # One that names no interface is a subscriber's, as in vLLM.
            own = "*" in config.endpoint or "::" in config.endpoint or config.endpoint.startswith("ipc:")
            (self._publish.bind if own else self._publish.connect)(config.endpoint)
            if config.replay_endpoint is not None:
                self._replay.bind(config.replay_endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise CannotServe(f"--kv-events-config: {error}: {config.endpoint}, {config.replay_endpoint}") from error

    async def run(self) -> None:
        """Publish until cancelled."""
        try:
            while True:
                self.step()
                await asyncio.sleep(EVERY_S)
        finally:
            self.close()

    def close(self) -> None:
        self._publish.close(linger=0)
        self._replay.close(linger=0)

    def step(self) -> None:
        """Publish what has changed, and answer the subscribers that ask for batches again."""
        self._send()
        self._answer()

    def _send(self) -> None:
        if events := self._events.collect(self._scheduler):
            number = next(self._numbers).to_bytes(8, "big")
            batch = msgspec.msgpack.encode([time.time(), events, 0])  # noqa: TID251 - gateways compare it with their clocks
            self._kept.append((number, batch))
            self._publish.send_multipart((self._topic, number, batch), zmq.NOBLOCK)

    def _answer(self) -> None:
        while self._replay.poll(0):
            subscriber, *_, first = self._replay.recv_multipart()
            for number, batch in [each for each in self._kept if each[0] >= first] + [(END, b"")]:
                self._replay.send_multipart((subscriber, b"", number, batch), zmq.NOBLOCK)
