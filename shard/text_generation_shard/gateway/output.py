"""Output: one of the sequences a call asked for; what it has brought, and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from text_generation_shard.engine import Admission, FinishReason, PromptScores, TopTokens
from text_generation_shard.gateway.errors import CallFailed
from text_generation_shard.gateway.stop_strings import StopWatch

_WORDS = {FinishReason.LENGTH: "length", FinishReason.EOS_TOKEN: "stop", FinishReason.STOP_TOKEN: "stop"}
CANCELLED = "cancelled"


class Output:
    """Told by `take`, `finish`, `fail` and `cancel`; whatever comes after its end is not part of it."""

    def __init__(
        self,
        index: int,
        admission: Admission,
        on_news: Callable[[], None],
        *,
        watch: StopWatch | None,
        keep_stop: bool,
    ) -> None:
        """`on_news` is called when there is something to read here. `keep_stop`: a stop token is part of the output."""
        self.index = index
        self.admission = admission
        """Its slot means nothing before it has one."""
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        """As many as there are tokens."""
        self.tops: dict[int, TopTokens] = {}
        """By place among the tokens; only where asked for."""
        self.prompt_scores: PromptScores | None = None
        self.leaving = 0
        """Tokens that are certain to be part of the output: what may be sent."""
        self.sent = 0
        """Tokens that were."""
        self.finish_reason: str | None = None
        self.matched: int | str | None = None
        """The stop token or stop string that ended it."""
        self.failure: CallFailed | None = None
        self._on_news = on_news
        self._watch = watch
        self._keep_stop = keep_stop

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None or self.failure is not None

    def take(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        tops: Sequence[TopTokens] = (),
        finish: FinishReason | None = None,
    ) -> None:
        """The next tokens, and whether the engine ended the sequence with the last of them."""
        if self.is_over:
            return
        first = len(self.token_ids)
        self.token_ids += token_ids
        self.logprobs += logprobs
        for top in tops:
            self.tops[first + top.index] = top
        # Neither an EOS token nor a stop token spells anything.
        spelling = len(token_ids) - (finish in (FinishReason.EOS_TOKEN, FinishReason.STOP_TOKEN))
        if self._watch is None:
            self.leaving = len(self.token_ids)
        elif self._find_stop(self._watch, token_ids[:spelling]):
            finish = None
        if finish is not None:
            self._finish(finish)
        self._on_news()

    def score_prompt(self, scores: PromptScores) -> None:
        """Log-probabilities of the prompt."""
        self.prompt_scores = scores

    def fail(self, failure: CallFailed) -> None:
        """It ends with an error."""
        if not self.is_over:
            self.failure = failure
            self._on_news()

    def cancel(self) -> None:
        """It ends here, with what it has."""
        if not self.is_over:
            self.finish_reason = CANCELLED
            self.leaving = len(self.token_ids)
            self._on_news()

    def _find_stop(self, watch: StopWatch, token_ids: Sequence[int]) -> bool:
        """Whether a stop string ends the sequence with one of these tokens."""
        for token_id in token_ids:
            watch.feed(token_id)
            if watch.matched is not None:
                self._cut(watch.leaving)
                self.finish_reason, self.matched = "stop", watch.matched
                return True
        self.leaving = watch.leaving
        return False

    def _finish(self, reason: FinishReason) -> None:
        self.finish_reason = _WORDS[reason]
        if reason is FinishReason.STOP_TOKEN:
            self.matched = self.token_ids[-1]
            if not self._keep_stop:
                self._cut(len(self.token_ids) - 1)
        self.leaving = len(self.token_ids)

    def _cut(self, length: int) -> None:
        """The output ends before token `length`."""
        del self.token_ids[length:], self.logprobs[length:]
        self.leaving = length
