"""Sequences of an engine that is scheduled step by step, their rows in a step, and the tokens sampled for them."""

from __future__ import annotations

import math
from array import array
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from text_generation_proto.values import FailureCode, FinishReason, Sampling, Stopping
from text_generation_shard.engine import NewSequence, PromptScores, StepResult
from text_generation_shard.grammar import Matcher

if TYPE_CHECKING:
    from text_generation_shard.step.replay import Replay

Ints = NDArray[np.int32]

GREEDY = Sampling()
"""The most probable token, unprocessed."""
FEW_TOKENS = 64
"""A chunk of fewer tokens before an image waits for it: a step for them takes as long as one with those of the image."""
NO_LIMIT = 1 << 40
"""Beyond any position."""


@dataclass(slots=True, eq=False)
class Sequence:
    """While it is in the persistent batch, `computed` and `generated` are not updated, nor are `tokens` without drafts."""

    slot: int
    tokens: array[int]
    prompt_length: int
    blocks: list[int]
    computed: int
    """Positions whose KV is in the blocks."""
    generated: int
    """New tokens recorded since it started in this slot."""
    generated_before: int
    """Tokens at the end of the prompt that were generated before that."""
    sampling: Sampling
    stopping: Stopping
    top_n: int
    prompt_scores: PromptScores | None
    """Filled chunk by chunk during prefill; None if not requested."""
    prompt_top_n: int = 0
    pending_matcher: Future[Matcher] | None = None
    """The matcher of its grammar until it is built. No token can be sampled before."""
    matcher: Matcher | None = None
    """None without a grammar."""
    chunk: int = 0
    """Prompt tokens ordered for the next step."""
    pending_images: Future[Any] | None = None
    """The images of the prompt until they are decoded; then the rows of the one that a chunk waits for."""
    images: Any = None
    """The images of the prompt once they are decoded, of a type of the engine. None without."""
    has_images: bool = False
    image_limit: int = 0
    """With images, the position of the first one whose rows are not taken yet, or NO_LIMIT; no chunk goes past it."""
    whole_images: list[tuple[int, int]] = field(default_factory=list)
    """First position and end of each image whose tokens must be in one chunk."""
    further: tuple[list[int], ...] = ()
    """KV blocks of the groups after the first, in order. Those before the first one that it was given are 0 and never read."""
    state_read: int = 0
    """The block of its state after its computed tokens, if the cache has a group of states."""
    state_write: int = 0
    """The block to which the last tokens of the next chunk write, and then each step."""
    state_behind: int = 0
    """Its last computed tokens that are not in its state: drafts that were right. The next step adds them."""
    states_ahead: list[tuple[int, int]] = field(default_factory=list)
    """(position of the first token that writes to it, block) of later blocks of its state, in order. Before each a checkpoint stays."""
    synced: list[int] = field(default_factory=lambda: [0])
    """Leading blocks of each group that the engine has copied to its block tables."""
    greedy_from: float = math.inf
    """Position from which on nothing but the most probable token is wanted."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that may end it."""
    is_held: bool = True
    """False once dropped. A step in progress may still produce a token for it."""
    adapter: str = ""
    draft_scope: tuple[str, str] = ("", "")
    """Only sequences of the same scope are drafted from its output: `NewSequence.draft_scope`, and the adapter."""
    no_drafts: bool = False
    """True: nothing is drafted for it."""
    prediction: list[int] = field(default_factory=list)
    allowed: NDArray[np.bool_] | None = None
    """By token: True for those of `sampling.allowed_token_ids`; made with the first token."""
    replay: Replay | None = None
    """The scores of the generated tokens at the end of its prompt; None if not requested."""
    end: int = 0
    """First position that its blocks or its maximum length exclude; see `update_end`."""

    @classmethod
    def of(cls, new: NewSequence) -> Sequence:
        """Create the sequence that `new` describes."""
        scored = len(new.prompt) - new.generated_tokens
        scores: PromptScores | None = None
        if new.logprobs.prompt:
            # The first token has no context, and cached positions are not computed again: NaN, as the contract says.
            tops: list[tuple[tuple[int, ...], tuple[float, ...]]] | None = None
            if new.logprobs.prompt_top_n:
                tops = [((), ())] * scored
            scores = PromptScores(new.slot, [math.nan] * scored, tops)
        # Greedy sampling ignores the seed.
        greedy = replace(new.sampling, seed=0) == GREEDY and not new.logprobs.top_n and new.grammar is None
        return cls(
            slot=new.slot,
            tokens=array("I", new.prompt),
            prompt_length=len(new.prompt),
            blocks=list(new.blocks),
            further=tuple([0] * first + list(blocks) for first, blocks in new.further_blocks),
            synced=[0, *(first for first, _ in new.further_blocks)],
            computed=new.computed_tokens,
            generated=0,
            generated_before=new.generated_tokens,
            sampling=new.sampling,
            stopping=new.stopping,
            top_n=new.logprobs.top_n,
            prompt_top_n=new.logprobs.prompt_top_n,
            prompt_scores=scores,
            pending_matcher=new.matcher,
            pending_images=new.images,
            has_images=bool(new.media),
            image_limit=new.media[0].offset if new.media else 0,
            stop_ids=new.stopping.eos_token_ids | new.stopping.stop_token_ids,
            greedy_from=len(new.prompt) + new.stopping.min_new_tokens if greedy else math.inf,
            adapter=new.adapter,
            draft_scope=(new.draft_scope, new.adapter),
            no_drafts=new.no_drafts,
            prediction=list(new.prediction),
        )

    @property
    def last(self) -> int:
        """First position that is never computed: the last new token needs no KV."""
        return self.prompt_length + self.stopping.max_new_tokens - 1

    @property
    def tables(self) -> tuple[list[int], ...]:
        """Its KV blocks in each group."""
        return self.blocks, *self.further

    @property
    def is_ready(self) -> bool:
        """False while the mask of its next token is computed beside the steps."""
        return self.matcher is None or self.matcher.is_ready

    @property
    def most_of_chunk(self) -> int:
        """Tokens of its chunk that a step may compute: a step leaves one checkpoint before its last token, and ends at the next one."""
        later = [position for position, _ in self.states_ahead if position > self.computed]
        return min([self.chunk, *(position - self.computed for position in later[1:])])

    def take_states(self, length: int) -> tuple[int, int]:
        """Take the blocks of its state to which its next `length` tokens write.

        Return the block of the checkpoint that they leave, and the number of tokens after it; zeros if they leave none.
        """
        end, checkpoint = self.computed + length, (0, 0)
        while self.states_ahead and self.states_ahead[0][0] < end:
            position, block = self.states_ahead.pop(0)
            if position > self.computed:
                checkpoint = self.state_write, end - position
            self.state_write = block
        return checkpoint

    def chunk_of_images(self, most: int) -> int:
        """Return how many of the next `most` tokens can be computed with the images that are encoded; it may be negative."""
        end = min(self.computed + most, self.image_limit)
        if end < self.computed + min(most, FEW_TOKENS):
            return 0
        return next((first for first, after in self.whole_images if first < end < after), end) - self.computed

    def update_end(self, block_size: int) -> None:
        self.end = min(self.last, min(map(len, self.tables)) * block_size)

    def report_scores(self, result: StepResult) -> None:
        """Move the scores of its prompt to the result of the step that completes them."""
        if self.prompt_scores is not None:
            result.prompt_logprobs.append(self.prompt_scores)
        if self.replay is not None:
            result.generated_scores.append(self.replay.scores)
        self.prompt_scores = self.replay = None

    @property
    def suppressed(self) -> frozenset[int]:
        """Tokens that must not be sampled next because they would end the sequence before min_new_tokens."""
        return frozenset() if self.generated >= self.stopping.min_new_tokens else self.stop_ids

    @property
    def banned(self) -> frozenset[int]:
        """Tokens that would complete one of its bad words. It must have some."""
        words = self.sampling.bad_words
        start = self.prompt_length - self.generated_before
        end = tuple(self.tokens[max(start, len(self.tokens) - max(map(len, words)) + 1) :])
        before = ((word, len(end) + 1 - len(word)) for word in words)
        return frozenset(word[-1] for word, first in before if first >= 0 and end[first:] == word[:-1])


def finish_reason(stopping: Stopping, generated: int, token_id: int, *, grammar_ended: bool) -> FinishReason | None:
    """Return why new token number `generated` ends the sequence, LENGTH before EOS_TOKEN before STOP_SEQUENCE; None if it does not."""
    if generated >= stopping.max_new_tokens:
        return FinishReason.LENGTH
    if grammar_ended:
        return FinishReason.EOS_TOKEN
    if generated <= stopping.min_new_tokens:
        return None
    if token_id in stopping.eos_token_ids:
        return FinishReason.EOS_TOKEN
    if token_id in stopping.stop_token_ids:
        return FinishReason.STOP_SEQUENCE
    return None


@dataclass(frozen=True, slots=True)
class Draft:
    """Guesses of the next tokens of a sequence."""

    tokens: tuple[int, ...]
    source: str
    match: int
    """Tokens before them that were found."""


@dataclass(slots=True)
class StepRow:
    """The part of one sequence in a step: positions [start, start + length)."""

    sequence: Sequence
    start: int
    length: int
    samples: bool
    """True if the step also samples the token after the last of these positions."""
    drafts: tuple[int, ...] = ()
    """The tokens at the positions after the first, if they are drafted: the step then samples the token after each position."""
    draft_source: str = ""
    checkpoint: tuple[int, int] = (0, 0)
    """The result of `Sequence.take_states`."""

    def add(self, draft: Draft | None) -> None:
        """Let it verify a draft."""
        if draft is not None:
            self.drafts, self.draft_source = draft.tokens, draft.source
            self.length += len(draft.tokens)

    @property
    def prefills(self) -> bool:
        """True if the positions belong to the prompt."""
        return self.start < self.sequence.prompt_length

    @property
    def is_greedy(self) -> bool:
        """True if only the most probable token can follow, regardless of the previous step's token."""
        first_sampled = self.start + self.length - len(self.drafts)
        return first_sampled >= self.sequence.greedy_from


@dataclass(slots=True)
class PersistentRows:
    """The rows of the persistent batch in one step: each computes one position and samples the token after it."""

    sequences: list[Sequence]
    slots: Ints
    starts: Ints
    """The positions."""
    lasts: Ints
    """`Sequence.last` of each."""
    stop_ids: frozenset[int]
    """Union of the sequences' stop ids."""
    changed: list[Sequence]
    """Sequences that joined or got blocks since the previous step; not all are in this one."""
    epoch: int
    """Number of removals from the batch before this step was built."""

    def __len__(self) -> int:
        return len(self.sequences)

    def dropped(self) -> list[int]:
        """Return the indices of sequences that were dropped since the step was built."""
        return [index for index, sequence in enumerate(self.sequences) if not sequence.is_held]

    def may_finish(self, token_ids: list[int]) -> list[int]:
        """Return the indices of sequences that these tokens may end."""
        indices: list[int] = np.flatnonzero(self.starts + 1 >= self.lasts).tolist()
        if not self.stop_ids.isdisjoint(token_ids):
            indices += [index for index, token_id in enumerate(token_ids) if token_id in self.stop_ids]
        return indices


@dataclass(slots=True)
class StepRows:
    """All rows of a step: the persistent batch, then other decoding rows, then prompt chunks."""

    persistent: PersistentRows | None
    others: list[StepRow]

    def __len__(self) -> int:
        return self.num_persistent + len(self.others)

    @property
    def num_persistent(self) -> int:
        return 0 if self.persistent is None else len(self.persistent)

    @property
    def tokens(self) -> int:
        """Number of positions to compute."""
        return self.num_persistent + sum(row.length for row in self.others)

    @property
    def prefills(self) -> bool:
        """True if the step computes prompt tokens."""
        return bool(self.others) and self.others[-1].prefills

    @property
    def num_sampling(self) -> int:
        """Number of tokens that are sampled."""
        return self.num_persistent + sum(row.samples + len(row.drafts) for row in self.others)

    @property
    def sampling(self) -> list[StepRow]:
        """The rows outside the persistent batch that sample a token."""
        return [row for row in self.others if row.samples]

    def indexed(self) -> list[tuple[int, StepRow]]:
        """Return the rows of `sampling`, each with the index of its first sampled token among those of the step."""
        rows = self.sampling
        firsts = accumulate((1 + len(row.drafts) for row in rows), initial=self.num_persistent)
        return list(zip(firsts, rows, strict=False))

    @property
    def drafting(self) -> list[tuple[int, StepRow]]:
        """The rows with drafts, as in `indexed`."""
        if not any(row.drafts for row in self.others):
            return []
        return [(first, row) for first, row in self.indexed() if row.drafts]

    @property
    def sequences(self) -> list[Sequence]:
        return [*(() if self.persistent is None else self.persistent.sequences), *(row.sequence for row in self.others)]


@dataclass(slots=True)
class SamplerOutput:
    """The tokens of the rows that sample, in columns, in the order of the rows; a row with drafts has several."""

    token_ids: list[int]
    logprobs: list[float]
    failures: dict[int, tuple[FailureCode, str]] = field(default_factory=dict)
    """By index: the reason why there is no token. After the first of a row its position is computed again in a later step."""
    grammar_ended: set[int] = field(default_factory=set)
    """Indices of rows whose grammar is complete: the sequence ends with this token."""
    late: set[int] = field(default_factory=set)
    """Indices of decoding rows whose mask is not ready: their position is computed again in a later step."""


def take_tokens(row: StepRow, first: int, output: SamplerOutput) -> tuple[int, FinishReason | None]:
    """Give the sequence of a row with drafts its new tokens; return their number, and the reason if the last one ends it.

    They are those that equal the drafts, and the one after them. `first` is the index in `output` of the first.
    """
    sequence, matcher, taken = row.sequence, row.sequence.matcher, 0
    for index, draft in enumerate((*row.drafts, None), first):
        if index in output.failures:
            break
        token_id, ended = output.token_ids[index], index in output.grammar_ended
        sequence.tokens.append(token_id)
        sequence.generated += 1
        taken += 1
        if reason := finish_reason(sequence.stopping, sequence.generated, token_id, grammar_ended=ended):
            return taken, reason
        if matcher is not None:
            matcher.accept(token_id)
        if token_id != draft:
            break
    sequence.computed = row.start + taken
    sequence.state_behind = taken - 1
    return taken, None
