"""What the engine says of one sequence in one iteration."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class FinishReason(Enum):
    """Why a sequence ended; names of `tensorrt_llm.bindings.executor.FinishReason`."""

    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5


@dataclass(slots=True)
class Logprob:
    """One candidate's log-probability, and its place among the candidates from 1. 1.2.1: executor/result.py."""

    logprob: float
    rank: int | None = None


Logprob.__module__ = "tensorrt_llm.executor.result"
TokenLogprobs = list[dict[int, Logprob]]


class Response:
    """Tokens that a sequence made since the last response, and how it stands. Most bring tokens and nothing else: what is
    rare has its default on the class, so that it costs them nothing."""

    is_plain = True
    """Whether it brings tokens and nothing else."""
    finish: FinishReason | None = None
    is_final = False
    """Nothing more comes for the whole request."""
    logprobs: list[Any] | None = None
    """One entry a token; None if none were asked for."""
    cumulative_logprob: float | None = None
    prompt_logprobs: TokenLogprobs | list[float] | None = None

    def __init__(self, index: int, tokens: list[int], iteration: int, cached_tokens: int) -> None:
        self.index = index
        """Which of the request's sequences."""
        self.tokens = tokens
        self.iteration = iteration
        """How many iterations the sequence has been through."""
        self.cached_tokens = cached_tokens
