"""One sequence of a step engine, and its part in a step."""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import dataclass, replace

from text_generation_proto.values import FinishReason, Sampling, Stopping
from text_generation_shard.engine import NewSequence, PromptScores
from text_generation_shard.grammar import Matcher

PLAIN = Sampling()
"""Nothing asked: the most probable token."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence: its tokens, how far they are computed – as long as it is not steady –, and what it was admitted with."""

    slot: int
    tokens: list[int]
    prompt_length: int
    blocks: list[int]
    computed: int
    generated: int
    """New tokens since this admission, as far as they are recorded."""
    generated_before: int
    """Trailing prompt tokens that were generated before this admission."""
    sampling: Sampling
    stopping: Stopping
    top_n: int
    prompt_scores: PromptScores | None
    """Filled chunk by chunk while the prompt is computed; None if not asked for."""
    prompt_top_n: int = 0
    building: Future[Matcher] | None = None
    """The matcher of its grammar, until it is there: no token can be chosen before."""
    matcher: Matcher | None = None
    """None: no grammar."""
    chunk: int = 0
    """Prompt tokens ordered for the next step."""
    told_blocks: int = 0
    """How many of the blocks the engine's tables of all slots know."""
    plain_from: float = math.inf
    """The position from which on the most probable token follows, whatever came before, and nothing else is told of it."""
    enders: frozenset[int] = frozenset()
    """Tokens that may end it."""
    is_held: bool = True
    """False once it is dropped: a step under way may still bring a token for it."""
    end: int = 0
    """The position that its grant, or its last token, does not go beyond: see `settle_end`."""

    @property
    def last(self) -> int:
        """The position that the longest answer does not go beyond: the last token chosen is never computed."""
        return self.prompt_length + self.stopping.max_new_tokens - 1

    def settle_end(self, block_size: int) -> None:
        """Find `end` anew, after a grant."""
        self.end = min(self.last, len(self.blocks) * block_size)

    @property
    def suppressed(self) -> frozenset[int]:
        """Tokens that may not be chosen next, because they would end the sequence too early."""
        if self.generated >= self.stopping.min_new_tokens:
            return frozenset()
        return self.enders


@dataclass(slots=True)
class Row:
    """A sequence's part in a step: compute positions [start, start + length)."""

    sequence: Sequence
    start: int
    length: int
    samples: bool
    """Whether the step also chooses the token after the last of these positions."""

    @property
    def prefills(self) -> bool:
        """Whether these are tokens of the prompt."""
        return self.start < self.sequence.prompt_length


def admitted(admission: NewSequence) -> Sequence:
    """The sequence that an admission asks for."""
    scored = len(admission.prompt) - admission.generated_tokens
    return Sequence(
        slot=admission.slot,
        tokens=list(admission.prompt),
        prompt_length=len(admission.prompt),
        blocks=list(admission.blocks),
        computed=admission.computed_tokens,
        generated=0,
        generated_before=admission.generated_tokens,
        sampling=admission.sampling,
        stopping=admission.stopping,
        top_n=admission.logprobs.top_n,
        prompt_top_n=admission.logprobs.prompt_top_n,
        # The first token has nothing before it, and cached ones are not computed again: NaN, as the contract says.
        prompt_scores=PromptScores(
            admission.slot, [float("nan")] * scored, [((), ())] * scored if admission.logprobs.prompt_top_n else None
        )
        if admission.logprobs.prompt
        else None,
        building=admission.matcher,
        enders=admission.stopping.eos_token_ids | admission.stopping.stop_token_ids,
        plain_from=len(admission.prompt) + admission.stopping.min_new_tokens if _is_plain(admission) else math.inf,
    )


def _is_plain(admission: NewSequence) -> bool:
    # Where nothing is drawn the seed means nothing.
    return replace(admission.sampling, seed=0) == PLAIN and not admission.logprobs.top_n and admission.grammar is None


def finish_reason(stopping: Stopping, generated: int, token_id: int, *, ends: bool) -> FinishReason | None:
    """LENGTH wins over EOS_TOKEN, which wins over STOP_TOKEN, on the same token, which is the one of this number."""
    if generated >= stopping.max_new_tokens:
        return FinishReason.LENGTH
    if ends:
        return FinishReason.EOS_TOKEN
    if generated <= stopping.min_new_tokens:
        return None
    if token_id in stopping.eos_token_ids:
        return FinishReason.EOS_TOKEN
    if token_id in stopping.stop_token_ids:
        return FinishReason.STOP_SEQUENCE
    return None
