"""A request inside the engine, its sequence, and made-up log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trtllm_standin.choice import ChoiceError, Chooser
from trtllm_standin.queues import AsyncQueue
from trtllm_standin.results import FinishReason, Logprob, Response, TokenLogprobs
from trtllm_standin.settings import Fault

BEST_LOGPROB = -0.5
"""Log-probability of the prompt's next token; each following token id gets LOGPROB_STEP less."""
LOGPROB_STEP = 0.7


class StepFault(Exception):
    """A fault of the whole step; `fault` is its kind."""

    def __init__(self, fault: Fault, token: int) -> None:
        super().__init__(f"token {token} causes the fault {fault.name}, as the environment sets it")
        self.fault = fault


@dataclass(slots=True)
class LogprobOptions:
    """The log-probabilities that a request wants; None: no log-probabilities."""

    top: int | None = None
    """Number of most probable tokens."""
    prompt_top: int | None = None
    vocab_size: int = 0
    own_prompt_logprobs: bool = True


@dataclass(slots=True, eq=False)
class Request:
    """A request as the engine holds it."""

    id: int
    queue: AsyncQueue
    """Takes its items."""
    prompt: list[int]
    limit: int
    """Largest number of new tokens, at least 1."""
    end_id: int
    """-1: none."""
    stop_token_ids: frozenset[int]
    streaming: bool
    salt: str | None = None
    logprobs: LogprobOptions = field(default_factory=LogprobOptions)
    faults: Mapping[int, Fault] = field(default_factory=dict)


class Sequence:
    """The generation of a request. A plain greedy one has no chooser, and costs next to nothing."""

    __slots__ = (
        "_cursor",
        "_is_plain",
        "_iteration",
        "_limit",
        "_logprobs",
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
        "is_generating",
        "prefilled",
        "prompt_logprobs",
        "request",
    )

    def __init__(self, request: Request, chooser: Chooser | None) -> None:
        self.request = request
        self.chooser = chooser
        self.generated: list[int] = []
        self.finish: FinishReason | None = None
        self.error: str | None = None
        """The reason of the failure."""
        self.prefilled = 0
        """Computed prompt tokens, cached ones included."""
        self.cached = 0
        self.blocks = 0
        self.is_generating = False
        """The prompt is computed."""
        self.prompt_logprobs: TokenLogprobs | None = None
        self._prompt = request.prompt
        self._period = len(request.prompt)
        self._limit = request.limit
        self._cursor = 0
        self._iteration = 0
        self._unsent: list[int] = []
        options = request.logprobs
        self._logprobs: TokenLogprobs | None = None if options.top is None else []
        self._watched = frozenset({request.end_id} | request.stop_token_ids | request.faults.keys())
        wants_logprobs = options.top is not None or options.prompt_top is not None
        self._is_plain = request.streaming and chooser is None and not wants_logprobs

    def step(self, count: int, interval: int) -> Response | None:
        """Generate up to `count` tokens. Return what is sent in this iteration, if anything. Raises StepFault."""
        if self._is_plain and count == interval == 1:
            cursor = self._cursor
            token = self._prompt[cursor]
            if token not in self._watched and len(self.generated) + 1 < self._limit:
                # The path of nearly all tokens in benchmarks.
                self._cursor = cursor + 1 if cursor + 1 < self._period else 0
                self.generated.append(token)
                self._iteration += 1
                return Response([token], self.cached)
        self._advance(count)
        return None if self.error is not None else self._take(interval)

    def cancel(self, *, with_token: bool) -> Response | None:
        """End as cancelled. Return the last item; `with_token`, it has one more token without log-probabilities."""
        self.finish = FinishReason.CANCELLED
        if with_token and self._logprobs is not None:
            self._unsent.append(self._prompt[self._cursor])
        return self._take(1)

    def score_prompt(self) -> None:
        """Make up the prompt's log-probabilities if they are wanted.

        Row t is for the token after position t, the last row for the first new token (result.py at 1.2.1). Cached tokens have no
        rows (nvbugs/5577178, for which tests on main salt the cache). A token equal to the one before it counts as improbable.
        """
        options, prompt = self.request.logprobs, self._prompt
        if options.prompt_top is None:
            return
        self.prompt_logprobs = []
        for position in range(self.cached, len(prompt)):
            token = prompt[(position + 1) % len(prompt)]
            expected = token if token != prompt[position] else (token + 1) % options.vocab_size
            row = token_logprobs(token, expected, options.prompt_top, options.vocab_size)
            if token != expected and not options.own_prompt_logprobs:
                del row[token]
            self.prompt_logprobs.append(row)

    def _advance(self, count: int) -> None:
        self._iteration += 1
        for _ in range(count):
            try:
                token = self._next()
            except ChoiceError as error:
                self.error = str(error)
                return
            finish = self._examine(token) if token in self._watched else None
            if self.error is not None:
                return
            self.generated.append(token)
            self._unsent.append(token)
            if self._logprobs is not None:
                options = self.request.logprobs
                expected = self._prompt[(len(self.generated) - 1) % self._period]
                self._logprobs.append(token_logprobs(token, expected, options.top or 0, options.vocab_size))
            # Order of TorchSampler._handle_stop_criteria: end, length, stop tokens. A stop token at the limit ends the
            # sequence by length, and is not removed.
            if len(self.generated) >= self._limit and finish is not FinishReason.END_ID:
                finish = FinishReason.LENGTH
            if finish is not None:
                self.finish = finish
                return

    def _next(self) -> int:
        if self.chooser is not None:
            return self.chooser.choose(self.generated)
        cursor = self._cursor
        self._cursor = cursor + 1 if cursor + 1 < self._period else 0
        return self._prompt[cursor]

    def _take(self, interval: int) -> Response | None:
        """Return all unsent tokens at the first, the last, and each `interval`th iteration (_handle_responses)."""
        request, iteration = self.request, self._iteration
        if self.finish is None and (not request.streaming or (iteration != 1 and iteration % interval)):
            return None
        response = Response(self._unsent, self.cached)
        self._unsent = []
        response.finish = self.finish
        if self._logprobs is not None:
            response.logprobs, self._logprobs = self._logprobs, []
        response.prompt_logprobs = self.prompt_logprobs
        return response

    def _examine(self, token: int) -> FinishReason | None:
        fault = self.request.faults.get(token)
        if fault is Fault.REQUEST:
            self.error = f"token {token} fails its request, as the environment sets it"
            return None
        if fault is not None:
            raise StepFault(fault, token)
        return FinishReason.END_ID if token == self.request.end_id else FinishReason.STOP_WORDS


def token_logprobs(token: int, expected: int, top: int, vocab_size: int) -> dict[int, Logprob]:
    """Return the `top` most probable tokens of a position, and the chosen one.

    The chosen token comes first, even if it is not among them; then there are top + 1 entries
    (_torch/pyexecutor/sampler/logprobs.py on main).
    """
    ranks = {(expected + rank) % vocab_size: rank for rank in range(top)}
    rank = ranks.pop(token, 0 if token == expected else max(top, 1))
    return {id_: Logprob(BEST_LOGPROB - LOGPROB_STEP * at, at + 1) for id_, at in {token: rank, **ranks}.items()}
