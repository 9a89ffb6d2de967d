"""Keeps what one request brings, for replies sent whole."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from text_generation_router.errors import ServingError
from text_generation_router.generation import Ending, Piece, Times
from text_generation_router.request import LogprobJson, Request, TopToken


class Collector:
    """A sink that keeps everything, for replies sent whole."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.pieces: list[Piece] = []
        self.prompt_logprobs: Sequence[LogprobJson] = ()
        self.prompt_tops: Sequence[Sequence[TopToken]] = ()
        self.ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        """The request's end; its failure is raised."""
        self.times = Times()

    def on_piece(self, piece: Piece) -> None:
        self.pieces.append(piece)
        if piece.ending is not None and not self.ended.done():
            self.ended.set_result(piece.ending)

    def on_prompt_logprobs(self, logprobs: Sequence[LogprobJson], tops: Sequence[Sequence[TopToken]]) -> None:
        self.prompt_logprobs = logprobs
        self.prompt_tops = tops

    def on_failure(self, error: ServingError) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # of several sequences that fail only the first is asked; the rest need no warning

    @property
    def mean_logprob(self) -> float:
        """What `best_of` ranks by, over the tokens whose log-probability is known; a sequence without one ranks last."""
        known = [float(piece.logprob) for piece in self.pieces if piece.logprob != b"null"]
        return sum(known) / len(known) if known else float("-inf")
