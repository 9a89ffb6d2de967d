"""Tokens of several steps told together: how often a client hears of a sequence is not how often it is computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from text_generation_shard.engine import PromptScores, StepResult, TopTokens


@dataclass(slots=True)
class _Saved:
    """What a sequence has that nobody was told of."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_tokens: list[TopTokens] = field(default_factory=list)
    prompt_logprobs: list[PromptScores] = field(default_factory=list)


class Coalescer:
    """Saves a sequence's tokens up until there are `tokens_per_report`, or the sequence ends."""

    def __init__(self, tokens_per_report: int) -> None:
        self._enough = tokens_per_report
        self._saved: dict[int, _Saved] = {}

    def add(self, result: StepResult) -> StepResult:
        """What is to be told after a step that brought `result`, one token a slot at most."""
        if self._enough == 1:
            return result
        for slot, token_id, logprob in zip(result.slots, result.token_ids, result.logprobs, strict=True):
            saved = self._saved.setdefault(slot, _Saved())
            saved.token_ids.append(token_id)
            saved.logprobs.append(logprob)
        for top in result.top_tokens:
            saved = self._saved[top.slot]
            saved.top_tokens.append(replace(top, index=len(saved.token_ids) - 1))
        for scores in result.prompt_logprobs:
            self._saved[scores.slot].prompt_logprobs.append(scores)
        ended = [slot for slot, _ in result.finished] + [failure.slot for failure in result.failed]
        due = [slot for slot in result.slots if len(self._saved[slot].token_ids) >= self._enough]
        told = StepResult(
            prefilled=result.prefilled, finished=result.finished, failed=result.failed, forward_ns=result.forward_ns
        )
        self._tell((*due, *ended), told)
        return told

    def rest(self) -> StepResult | None:
        """Everything saved, for when nothing goes on; None if there is nothing."""
        if not self._saved:
            return None
        told = StepResult()
        self._tell(list(self._saved), told)
        return told

    def drop(self, slot: int) -> None:
        """Nobody wants this sequence's tokens any more."""
        self._saved.pop(slot, None)

    def clear(self) -> None:
        """Nobody wants any."""
        self._saved.clear()

    def _tell(self, slots: Iterable[int], told: StepResult) -> None:
        for slot in slots:
            if saved := self._saved.pop(slot, None):
                told.slots.append(slot)
                told.token_counts.append(len(saved.token_ids))
                told.token_ids += saved.token_ids
                told.logprobs += saved.logprobs
                told.top_tokens += saved.top_tokens
                told.prompt_logprobs += saved.prompt_logprobs
