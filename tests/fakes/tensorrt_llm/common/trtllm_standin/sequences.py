"""A request inside the engine, and its sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trtllm_standin import logprobs
from trtllm_standin.choice import ChoiceError, Chooser
from trtllm_standin.responses import FinishReason, Response, TokenLogprobs
from trtllm_standin.settings import Fault

if TYPE_CHECKING:
    from trtllm_standin.queues import AnyQueue


class StepFault(Exception):
    """A fault that is not one sequence's own; `fault` says which."""

    def __init__(self, fault: Fault, token: int) -> None:
        super().__init__(f"token {token} was to be emitted, and the environment says what comes of it: {fault.name}")
        self.fault = fault


@dataclass(slots=True)
class LogprobWish:
    """Which log-probabilities a request wants."""

    top: int | None = None
    """Most probable tokens beside each chosen one; None: nothing at all."""
    is_simple: bool = False
    prompt_top: int | None = None
    prompt_is_simple: bool = False
    vocab_size: int = 0
    always_scores_prompt: bool = True


@dataclass(slots=True, eq=False)
class Request:
    """One generate_async, as the engine holds it."""

    id: int
    queue: AnyQueue
    """Where its items go."""
    prompt: list[int]
    limit: int
    """Tokens that a sequence may have, at least 1."""
    end_id: int
    """-1 for none."""
    stop_words: list[list[int]]
    streaming: bool
    beam_width: int = 1
    salt: str | None = None
    priority: float = 0.5
    wish: LogprobWish = field(default_factory=LogprobWish)
    faults: Mapping[int, Fault] = field(default_factory=dict)
    sequences: list[Sequence] = field(default_factory=list)
    open_sequences: int = 0
    """How many of them have not ended."""


class Sequence:
    """One answer in the making. The plain case – greedy, nothing forbidden – has no chooser, and costs next to nothing."""

    __slots__ = (
        "_cumulative",
        "_cursor",
        "_is_plain",
        "_limit",
        "_logprobs",
        "_long_stops",
        "_period",
        "_prompt",
        "_unsent",
        "_watched",
        "blocks",
        "cached",
        "chooser",
        "error",
        "finish",
        "generated",
        "index",
        "is_generating",
        "is_started",
        "iteration",
        "prefilled",
        "prompt_logprobs",
        "request",
    )

    def __init__(self, request: Request, index: int, chooser: Chooser | None) -> None:
        self.request = request
        self.index = index
        self.chooser = chooser
        self.generated: list[int] = []
        self.finish: FinishReason | None = None
        self.error: str | None = None
        """Why it failed, if it did."""
        self.iteration = 0
        self.prefilled = 0
        """Prompt tokens computed; those that a cache held count."""
        self.cached = 0
        self.blocks = 0
        self.is_started = False
        """Whether it holds blocks."""
        self.is_generating = False
        """Whether its prompt is computed."""
        self.prompt_logprobs: TokenLogprobs | list[float] | None = None
        self._prompt = request.prompt
        self._period = len(request.prompt)
        self._limit = request.limit
        self._cursor = 0
        self._unsent: list[int] = []
        self._logprobs: list[Any] | None = None if request.wish.top is None else []
        self._cumulative = 0.0
        self._long_stops = [words for words in request.stop_words if len(words) > 1]
        singles = {words[0] for words in request.stop_words if len(words) == 1}
        self._watched = frozenset({request.end_id} | singles | request.faults.keys())
        wish = request.wish
        wants_nothing = wish.top is None and wish.prompt_top is None
        self._is_plain = request.streaming and chooser is None and not self._long_stops and wants_nothing

    def step(self, count: int, interval: int) -> Response | None:
        """Choose up to `count` tokens, until it ends; what is to be sent of them, if anything. Raises StepFault."""
        if self._is_plain and count == interval == 1:
            cursor = self._cursor
            token = self._prompt[cursor]
            if token not in self._watched and len(self.generated) + 1 < self._limit:
                # The way of nearly all tokens: kept short, for it is measured.
                self._cursor = cursor + 1 if cursor + 1 < self._period else 0
                self.generated.append(token)
                self.iteration += 1
                return Response(self.index, [token], self.iteration, self.cached)
        self._advance(count)
        return None if self.error is not None else self._take(interval)

    def _advance(self, count: int) -> None:
        self.iteration += 1
        generated = self.generated
        for _ in range(count):
            if self.chooser is None:
                cursor = self._cursor
                token = self._prompt[cursor]
                self._cursor = cursor + 1 if cursor + 1 < self._period else 0
            else:
                try:
                    token = self.chooser.choose(generated)
                except ChoiceError as error:
                    self.error = str(error)
                    return
            finish = self._look(token) if token in self._watched else None
            if self.error is not None:
                return
            generated.append(token)
            self._unsent.append(token)
            if self._logprobs is not None:
                self._score(token)
            # The order of TorchSampler._handle_stop_criteria: end, length, stop words. A stop that is also the last token
            # allowed ends it by length, and is not cut off.
            if len(generated) >= self._limit and finish is not FinishReason.END_ID:
                finish = FinishReason.LENGTH
            elif finish is None and self._long_stops and self._ends_in_stop():
                finish = FinishReason.STOP_WORDS
            if finish is not None:
                self.finish = finish
                return

    def _take(self, interval: int) -> Response | None:
        """What is to be sent after this iteration: at the first, at the last, at each `interval`th, everything since the
        last time (py_executor.py, _handle_responses)."""
        request, iteration = self.request, self.iteration
        if self.finish is not None:
            request.open_sequences -= 1
        elif not request.streaming or (iteration != 1 and iteration % interval):
            return None
        response = Response(self.index, self._unsent, iteration, self.cached)
        self._unsent = []
        response.is_plain = False
        if self.finish is not None:
            response.finish = self.finish
            response.is_final = request.open_sequences == 0
        if self._logprobs is not None:
            response.logprobs, self._logprobs = self._logprobs, []
            response.cumulative_logprob = self._cumulative
        if self.prompt_logprobs is not None:
            response.prompt_logprobs = self.prompt_logprobs
        return response

    def cancel(self, *, with_token: bool) -> Response | None:
        """End it as cancelled: its last item, with what was not sent yet – `with_token`, and with one more token that has no
        logprobs."""
        self.finish = FinishReason.CANCELLED
        if with_token and self._logprobs is not None:
            self._unsent.append(self._prompt[self._cursor])
        return self._take(1)

    def score_prompt(self) -> None:
        """Make up the prompt's log-probabilities, if they are wanted, once it is computed."""
        wish = self.request.wish
        if wish.prompt_top is None:
            return
        # Only what was computed has context logits: what came from the cache is missing at the front (nvbugs/5577178,
        # for which tests on main salt the cache).
        rows = logprobs.of_prompt(
            self._prompt,
            self.cached,
            self._prompt[0],
            wish.prompt_top,
            wish.vocab_size,
            always_own=wish.always_scores_prompt,
        )
        is_simple = wish.prompt_is_simple
        self.prompt_logprobs = [next(iter(row.values())).logprob for row in rows] if is_simple else rows

    def _look(self, token: int) -> FinishReason | None:
        fault = self.request.faults.get(token)
        if fault is Fault.REQUEST:
            self.error = f"token {token} fails its request, as the environment says"
            return None
        if fault is not None:
            raise StepFault(fault, token)
        return FinishReason.END_ID if token == self.request.end_id else FinishReason.STOP_WORDS

    def _score(self, token: int) -> None:
        wish = self.request.wish
        expected = self._prompt[(len(self.generated) - 1) % self._period]
        entries = self._logprobs
        if entries is None or wish.top is None:
            return
        if wish.is_simple:
            entries.append(logprobs.of_token_alone(token, expected))
        else:
            entries.append(logprobs.of_token(token, expected, wish.top, wish.vocab_size))
        self._cumulative += logprobs.total(entries[-1:], [token])

    def _ends_in_stop(self) -> bool:
        return any(self.generated[-len(words) :] == words for words in self._long_stops)
