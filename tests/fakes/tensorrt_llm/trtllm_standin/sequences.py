"""The generation of one request, with made-up log-probabilities: the tokens of the prompt again and again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Protocol

from trtllm_standin.results import FinishReason, Logprob, RequestOutput, Response
from trtllm_standin.settings import Fault

BEST_LOGPROB = -0.5
"""Log-probability of the chosen token; each following token id gets LOGPROB_STEP less."""
LOGPROB_STEP = 0.7


class Guide(Protocol):
    """Restricts the tokens of a sequence."""

    def choose(self, wanted: int) -> int:
        """Return the next token: `wanted` if it is allowed."""


class RequestFault(Exception):
    """A fault of one request."""


class StepFault(Exception):
    """A fault of the whole step; `fault` is its kind."""

    def __init__(self, fault: Fault, cause: str) -> None:
        super().__init__(cause)
        self.fault = fault


@dataclass(slots=True, eq=False)
class Sequence:
    """A request inside the engine."""

    result: RequestOutput
    """Takes its items."""
    prompt: list[int]
    limit: int
    """Largest number of new tokens, at least 1."""
    end_id: int
    """-1: none."""
    stop_token_ids: frozenset[int]
    top: int | None
    """Number of most probable tokens; None: no log-probabilities."""
    prompt_top: int | None
    vocab_size: int
    faults: Mapping[int, Fault]
    guide: Guide | None = None
    adapter: int = 0
    """LoRA adapter that changes its tokens: they come in the reverse order; 0: none."""
    root: tuple[object, ...] = ()
    """Salt and adapter: sequences share computed blocks only if theirs are the same."""
    cached: int = 0
    """Prompt tokens whose blocks were computed before."""
    generated: int = 0
    drafted: tuple[int, int, int] = (0, 0, 0)
    """Accepted and drafted tokens, and drafts."""
    prefilled: int = 0
    """Computed prompt tokens."""
    blocks: Mapping[int, int] = field(default_factory=dict)
    """Attention window → KV blocks."""
    scheduling: Any = None
    """SchedulingParams."""
    rank: Any = None
    """The attention data parallel rank that has it."""
    waited: bool = False
    """It was active, and there were too few KV blocks for it."""
    expected: cycle[int] = field(init=False)

    def __post_init__(self) -> None:
        self.expected = cycle(self.prompt[:: -1 if self.adapter else 1])

    @property
    def id(self) -> int:
        return self.result.request_id

    @property
    def is_generating(self) -> bool:
        """True if the prompt is computed."""
        return self.prefilled == len(self.prompt)

    def step(self, count: int) -> Response:
        """Generate up to `count` tokens. Raises RequestFault or StepFault."""
        # On every response, the first included (py_executor.py, _handle_responses).
        response = Response([], None if self.top is None else [], cached_tokens=self.cached)
        while response.finish is None and len(response.tokens) < count:
            token = next(self.expected)
            if self.guide is not None:
                token = self.guide.choose(token)
            if (fault := self.faults.get(token)) is Fault.REQUEST:
                raise RequestFault(f"token {token} fails its request, as the environment sets it")
            if fault is not None and fault is not Fault.UNSCORED:
                raise StepFault(fault, f"token {token} causes the fault {fault.name}, as the environment sets it")
            self.generated += 1
            response.tokens.append(token)
            if response.logprobs is not None and fault is None:
                response.logprobs.append(self._logprobs(token, self.top))
            response.finish = self._finish(token)
        if self.prompt_top is not None:
            # Row t is for the token after position t, the last row for the first new token (result.py at 1.2.1).
            following = (*self.prompt[1:], self.prompt[0])
            response.prompt_logprobs = [self._logprobs(token, self.prompt_top) for token in following]
        return response

    def cancel(self, *, with_token: bool) -> Response:
        """Return the last item; `with_token`, it has one more token without log-probabilities."""
        tokens = [next(self.expected)] if with_token else []
        return Response(tokens, None if self.top is None else [], finish=FinishReason.CANCELLED)

    def _finish(self, token: int) -> FinishReason | None:
        """Order of TorchSampler._handle_stop_criteria: end, length, stop tokens. A stop token at the limit is not removed."""
        if token == self.end_id:
            return FinishReason.END_ID
        if self.generated >= self.limit:
            return FinishReason.LENGTH
        return FinishReason.STOP_WORDS if token in self.stop_token_ids else None

    def _logprobs(self, token: int, top: int | None) -> dict[int, Logprob]:
        ranks = range(max(top or 0, 1))
        return {(token + r) % self.vocab_size: Logprob(BEST_LOGPROB - LOGPROB_STEP * r, r + 1) for r in ranks}
