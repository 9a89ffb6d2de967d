"""The clients of a `SchedulerWorld`: their requests, and the tokens that they have received."""

from __future__ import annotations

from dataclasses import dataclass, field

from replica_world import EOS, FAILING_STEP_TOKEN, FAILING_TOKEN

from text_generation_proto.values import FailureCode, FinishReason
from text_generation_router.request import NO_MOVES, Moves, Priority, Request


@dataclass(frozen=True)
class RequestSpec:
    """A client's request. Times in seconds from now."""

    prompt: tuple[int, ...]
    new: int
    tenant: str = ""
    priority: Priority = Priority.DEFAULT
    salt: str = ""
    first_token_in: float | None = None
    queue_for: float | None = None
    end_in: float | None = None
    prompt_logprobs: bool = False
    ignore_eos: bool = False
    constrained: bool = False
    adapter: str = ""


@dataclass
class ClientView:
    """The tokens and the end that a client has received."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    end: FinishReason | FailureCode | None = None
    cancelled: bool = False
    moves: Moves = NO_MOVES
    placed_with: int | None = None
    """Tokens at its last placement; None while it has no replica."""

    def lost(self) -> None:
        """Count the loss of its replica, if it has one."""
        if self.placed_with is not None:
            self.moves = self.moves.after_loss(advanced=len(self.tokens) > self.placed_with)
            self.placed_with = None

    @property
    def is_live(self) -> bool:
        return self.end is None and not self.cancelled

    def expected(self) -> tuple[list[int], FinishReason | FailureCode]:
        """Return the tokens and the end of the request if nothing outside ends it: the echo engine repeats the prompt."""
        prompt, tokens = self.request.prompt[:: -1 if self.request.adapter else 1], []
        for number in range(self.request.max_new_tokens):
            token = prompt[number % len(prompt)]
            if token == FAILING_TOKEN:
                return tokens, FailureCode.NUMERICS
            if token == FAILING_STEP_TOKEN:
                return tokens, FailureCode.STEP
            tokens.append(token)
            if token == EOS and not self.request.ignore_eos and len(tokens) < self.request.max_new_tokens:
                return tokens, FinishReason.EOS_TOKEN
        return tokens, FinishReason.LENGTH
