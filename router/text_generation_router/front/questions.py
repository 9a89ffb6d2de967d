"""Questions: questions to the other end of a link, and answers to its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from itertools import count

import structlog
from google.protobuf.message import Message

from text_generation_proto.front import front_pb2 as pb
from text_generation_router.errors import GenerationFailed, ServingError
from text_generation_router.front.convert import refusal_from_pb, refusal_to_pb
from text_generation_router.front.link import LinkBroken

log = structlog.get_logger()

Answerer = Callable[[bytes], Awaitable[bytes]]
"""Answers questions about a subject. May raise ServingError."""
Answerers = Mapping[str, Answerer]
"""By subject."""


class LinkLost(Exception):
    """The link ended before the answer came."""


class Questions:
    """The questions of one end that have no answer yet, and those of the other end."""

    def __init__(
        self,
        send: Callable[[Message], None],
        envelope: Callable[..., Message],
        answerers: Answerers,
    ) -> None:
        """`envelope` is the message that this end sends."""
        self._send = send
        self._envelope = envelope
        self._answerers = answerers
        self._numbers = count(1)
        self._open: dict[int, asyncio.Future[bytes]] = {}
        self._answering: set[asyncio.Task[None]] = set()

    async def ask(self, about: str, body: bytes = b"") -> bytes:
        """Return the answer to a question. Raises ServingError, LinkLost."""
        return await self.send(
            lambda number: self._envelope(question=pb.Question(number=number, about=about, body=body))
        )

    async def send(self, message: Callable[[int], Message]) -> bytes:
        """Send a message with a number, and return its answer. Raises ServingError, LinkLost."""
        number = next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._open[number] = answer
        self._send(message(number))
        try:
            return await answer
        finally:
            del self._open[number]

    def answered(self, answer: pb.Answer) -> None:
        """Take an answer; no-op if the question was given up."""
        future = self._open.get(answer.number)
        if future is None or future.done():
            return
        if answer.HasField("refusal"):
            future.set_exception(refusal_from_pb(answer.refusal))
        else:
            future.set_result(answer.body)

    def answer(self, question: pb.Question) -> None:
        """Answer a question of the other end. Raises LinkBroken."""
        if question.about not in self._answerers:
            raise LinkBroken(f"a question about {question.about!r}")
        task = asyncio.get_running_loop().create_task(self._answer(question))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, question: pb.Question) -> None:
        answer = pb.Answer(number=question.number)
        try:
            answer.body = await self._answerers[question.about](question.body)
        except ServingError as error:
            answer.refusal.CopyFrom(refusal_to_pb(error))
        except Exception:  # the other end must not wait for ever
            log.exception("a question could not be answered", about=question.about)
            answer.refusal.CopyFrom(refusal_to_pb(GenerationFailed("internal error")))
        self._send(self._envelope(answer=answer))

    def end(self) -> None:
        """Give all questions up: the link ended."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(LinkLost())
        for task in self._answering:
            task.cancel()
