"""One sequence's output, as the caller sees it grow. 1.2.1: executor/result.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trtllm_standin.responses import FinishReason, Response, TokenLogprobs

PLAIN_REASONS = {
    FinishReason.END_ID: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMED_OUT: "timeout",
    FinishReason.CANCELLED: "cancelled",
}


@dataclass(slots=True)
class CompletionOutput:
    """Cumulative: `token_ids` holds everything so far, and is one list that grows – until a stop is cut off its end."""

    index: int
    text: str = ""
    token_ids: list[int] | None = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: TokenLogprobs | list[float] | None = field(default_factory=list)
    prompt_logprobs: TokenLogprobs | list[float] | None = field(default_factory=list)
    finish_reason: Literal["stop", "length", "timeout", "cancelled"] | None = None
    stop_reason: int | str | None = None
    generation_logits: Any = None
    additional_context_outputs: dict[str, Any] | None = None
    additional_generation_outputs: dict[str, Any] | None = None
    disaggregated_params: Any = None
    request_perf_metrics: Any = None
    _postprocess_result: Any = None
    _last_text_len: int = field(default=0, init=False)
    _last_token_ids_len: int = field(default=0, init=False)
    _last_logprobs_len: int = field(default=0, init=False)
    _incremental_states: dict[str, Any] | None = field(default=None, init=False)

    @property
    def length(self) -> int:
        """Tokens so far."""
        return len(self.token_ids or ())

    @property
    def text_diff(self) -> str:
        """Text since the item before."""
        return self.text[self._last_text_len :]

    @property
    def token_ids_diff(self) -> list[int]:
        """Tokens that the last item *of this sequence* brought: with n > 1 it repeats while others get theirs, and
        after a stop was cut off it says nothing. Keep a count of your own."""
        return (self.token_ids or [])[self._last_token_ids_len :]

    @property
    def logprobs_diff(self) -> list[Any]:
        """Logprobs that the last item of this sequence brought."""
        return list(self.logprobs or [])[self._last_logprobs_len :]


CompletionOutput.__module__ = "tensorrt_llm.executor.result"
Stops = Sequence[tuple[int | str, list[int]]]


def fold(output: CompletionOutput, response: Response, stops: Stops, keeps_stop: bool) -> None:
    """Add a response to an output. `stops` are what may have ended it, in the order they are tried."""
    extend(output, response)
    tokens, logprobs = output.token_ids or [], output.logprobs
    if response.logprobs is not None:
        assert logprobs is not None
        output._last_logprobs_len = len(logprobs)
        logprobs += response.logprobs
        output.cumulative_logprob = response.cumulative_logprob
        # result.py at 1.2.1 asserts so for every item, the last one of a cancelled request included, which may have got
        # a token without its logprobs: not a RequestError, and yet only this request's affair.
        assert len(logprobs) == len(tokens), f"logprobs length: {len(logprobs)} != output.length: {len(tokens)}"
    if response.prompt_logprobs is not None:
        output.prompt_logprobs = response.prompt_logprobs
    if response.finish is None:
        return
    # A sequence's reason is set as soon as it ends, though others of its request go on.
    if response.finish is not FinishReason.STOP_WORDS:
        output.finish_reason = PLAIN_REASONS[response.finish]  # type: ignore[assignment]
        return
    output.finish_reason = "stop"
    for reason, words in stops:
        if tokens[-len(words) :] == words:
            output.stop_reason = reason
            if not keeps_stop:
                # A new list, shorter than what was there to see before if the stop is of several tokens; and the
                # logprobs of what is cut off stay (result.py: trimmed after they were added).
                output.token_ids = tokens[: -len(words)]
            return


def extend(output: CompletionOutput, response: Response) -> None:
    """Add a response's tokens alone."""
    tokens = output.token_ids
    assert tokens is not None
    output._last_token_ids_len = len(tokens)
    tokens += response.tokens
