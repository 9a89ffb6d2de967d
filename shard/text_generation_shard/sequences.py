"""The sequences a step engine holds, and which of them advance in a step.

Tokens of a sequence, as half-open intervals of positions:

    [0, computed)            KV sits in the blocks
    [computed, len(tokens))  known, not computed: prompt still to prefill, or the one token chosen last
    len(tokens)              what the step that computes position len(tokens) - 1 will choose

A sequence whose whole prompt is computed always has exactly one token to compute, so it *decodes*; before that it
*prefills*, only as far as it was ordered to. Neither runs past its grant: position p needs block p // block_size.

A step is *begun* when its computing is: from then on its positions count as computed, and what comes after can be begun
too, although the token it hangs on is known to the device only. A step is *recorded* when its tokens are known here. An
engine may be one step ahead of what is recorded; what a step brings for a sequence that is gone by then is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from text_generation_shard.checks import admission_problem
from text_generation_shard.chosen import Chosen
from text_generation_shard.engine import (
    Admission,
    EngineInfo,
    Failure,
    FailureCode,
    FinishReason,
    Orders,
    PromptScores,
    Sampling,
    StepResult,
    Stopping,
)
from text_generation_shard.grammar import GrammarError, Matcher
from text_generation_shard.kv_ledger import KVLedger

PLAIN = Sampling()


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence: its tokens, how far they are computed, and what it was admitted with."""

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
    """How many of the blocks a device with tables of its own knows."""
    plain_from: float = math.inf
    """The position from which on the most probable token follows, whatever came before, and nothing else is told of it."""
    enders: frozenset[int] = frozenset()
    """Tokens that may end it."""
    is_held: bool = True
    """False once it is dropped: a step under way may still bring a token for it."""
    end: int = 0
    """The position that its grant, or its last token, does not go beyond: see `settle_end`."""

    def settle_end(self, block_size: int) -> None:
        """Find `end` anew, after a grant. The last token chosen is never computed."""
        last = self.prompt_length + self.stopping.max_new_tokens - 1
        self.end = min(last, len(self.blocks) * block_size)

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


@dataclass(slots=True)
class SequenceTable:
    """Slots and their sequences. Knows the contract's bookkeeping; computes nothing."""

    info: EngineInfo
    num_blocks: int = 0
    ledger: KVLedger | None = None
    """Checks whose each block is and what it holds; None: whoever orders is believed."""
    _sequences: dict[int, Sequence] = field(default_factory=dict)
    _chunked: list[Sequence] = field(default_factory=list)
    """Sequences with a chunk ordered for the next step."""
    _building: list[Sequence] = field(default_factory=list)
    """Sequences whose grammar is being built."""
    _holders: dict[int, int] = field(default_factory=dict)
    """How many sequences hold a KV block; no entry for none."""

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def used_blocks(self) -> int:
        """KV blocks held; one that several share counts once."""
        return len(self._holders)

    def clear(self) -> None:
        """Drop every sequence."""
        for slot in list(self._sequences):
            self._remove(slot)
        self._chunked.clear()
        self._building.clear()
        if self.ledger is not None:
            self.ledger.clear()

    def apply(self, orders: Orders) -> list[Failure]:
        """Make the changes ordered; the sequences that cannot be as ordered are dropped and returned."""
        failed: list[Failure] = []
        for slot in orders.release:
            self._remove(slot)
        for admission in orders.admit:
            if problem := self._admission_problem(admission):
                # A slot named in a failure is free: an admission into a taken slot costs the tenant its place too,
                # or two sequences would share one name on the wire.
                self._remove(admission.slot)
                failed.append(Failure(admission.slot, FailureCode.INVALID, problem))
            else:
                self._admit(admission)
        if self._building:
            failed += self._take_matchers()
        for slot, blocks in orders.grants:
            # A grant may cross a finish on the wire; then nobody needs it.
            if sequence := self._sequences.get(slot):
                if problem := self._grant_problem(blocks):
                    failed.append(self._drop(sequence, FailureCode.INVALID, problem))
                else:
                    sequence.blocks.extend(blocks)
                    sequence.settle_end(self.info.block_size)
                    self._hold(blocks)
                    if self.ledger is not None:
                        self.ledger.grant(sequence, blocks)
        for slot, tokens in orders.prefill:
            if sequence := self._sequences.get(slot):
                if problem := self._chunk_problem(sequence, tokens):
                    failed.append(self._drop(sequence, FailureCode.INVALID, problem))
                else:
                    sequence.chunk = tokens
                    self._chunked.append(sequence)
        return failed

    def rows(self) -> list[Row]:
        """What the next step computes: every decoding sequence with room in its grant, then the ordered chunks."""
        rows = [
            Row(sequence, sequence.computed, 1, True)  # noqa: FBT003 – once a row, a step
            for sequence in self._sequences.values()
            if sequence.prompt_length <= sequence.computed < sequence.end
        ]
        waiting: list[Sequence] = []
        for sequence in self._chunked:
            if self._sequences.get(sequence.slot) is sequence and sequence.chunk:
                last = sequence.computed + sequence.chunk == sequence.prompt_length
                if last and sequence.building is not None:
                    waiting.append(sequence)
                    continue
                rows.append(Row(sequence, sequence.computed, sequence.chunk, samples=last))
                sequence.chunk = 0
        self._chunked = waiting
        return rows

    def begin(self, rows: list[Row]) -> None:
        """The step of these rows is under way."""
        for row in rows:
            row.sequence.computed += row.length

    def holds(self, row: Row) -> bool:
        """Whether the row's sequence is still there."""
        return row.sequence.is_held

    def advance(self, rows: list[Row], chosen: Chosen) -> StepResult:
        """Record a step begun before: `chosen` has one token for each row with `samples`, in order."""
        result = StepResult()
        token_ids, failures, ends = chosen.token_ids, chosen.failures, chosen.ends
        place = -1
        # Once a row, a step: whatever is looked up here is looked up hundreds of thousands of times a second.
        for row in rows:
            sequence = row.sequence
            place += row.samples
            if not sequence.is_held:
                continue
            if row.start < sequence.prompt_length:
                result.prefilled.append((sequence.slot, row.length))
                if not row.samples:
                    continue
            if place in failures:
                result.failed.append(self._drop(sequence, *failures[place]))
                continue
            if sequence.prompt_scores is not None:
                result.prompt_logprobs.append(sequence.prompt_scores)
                sequence.prompt_scores = None
            token_id = token_ids[place]
            sequence.tokens.append(token_id)
            sequence.generated = generated = sequence.generated + 1
            result.slots.append(sequence.slot)
            result.token_ids.append(token_id)
            result.logprobs.append(chosen.logprobs[place])
            may_end = generated >= sequence.stopping.max_new_tokens or token_id in sequence.enders or place in ends
            if may_end and (reason := _finish_reason(sequence, token_id, ends=place in ends)):
                result.finished.append((sequence.slot, reason))
                self._remove(sequence.slot)
            elif sequence.matcher is not None:
                sequence.matcher.accept(token_id)
        return result

    def fail(self, rows: list[Row], message: str) -> StepResult:
        """Drop the sequences of a step that failed as a whole."""
        return StepResult(
            failed=[self._drop(row.sequence, FailureCode.STEP, message) for row in rows if self.holds(row)]
        )

    def _admit(self, admission: Admission) -> None:
        sequence = self._sequences[admission.slot] = _admitted(admission)
        sequence.settle_end(self.info.block_size)
        if sequence.building is not None:
            self._building.append(sequence)
        self._hold(sequence.blocks)
        if self.ledger is not None:
            self.ledger.admit(sequence)

    def _hold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._holders[block] = self._holders.get(block, 0) + 1

    def _drop(self, sequence: Sequence, code: FailureCode, message: str) -> Failure:
        self._remove(sequence.slot)
        return Failure(sequence.slot, code, message)

    def _remove(self, slot: int) -> None:
        sequence = self._sequences.pop(slot, None)
        if sequence is None:
            return
        sequence.is_held = False
        if sequence.building is not None:
            sequence.building.cancel()
        for block in sequence.blocks:
            if (holders := self._holders[block] - 1) > 0:
                self._holders[block] = holders
            else:
                del self._holders[block]
        if self.ledger is not None:
            self.ledger.end(sequence)

    def _take_matchers(self) -> list[Failure]:
        """Give sequences the matchers that are there by now; those whose grammar cannot be built are dropped."""
        failed: list[Failure] = []
        building, self._building = self._building, []
        for sequence in building:
            future = sequence.building
            if future is None or self._sequences.get(sequence.slot) is not sequence:
                continue
            if not future.done():
                self._building.append(sequence)
            elif error := future.exception():
                message = str(error) if isinstance(error, GrammarError) else "the grammar cannot be read"
                failed.append(self._drop(sequence, FailureCode.INVALID, message))
            else:
                sequence.matcher, sequence.building = future.result(), None
        return failed

    def _admission_problem(self, admission: Admission) -> str | None:
        if admission.slot in self._sequences:
            return f"slot {admission.slot} is taken"
        return (
            admission_problem(admission, self.info)
            or self._blocks_problem(admission.blocks)
            or (None if self.ledger is None else self.ledger.admission_problem(admission))
        )

    def _grant_problem(self, blocks: tuple[int, ...]) -> str | None:
        return self._blocks_problem(blocks) or (None if self.ledger is None else self.ledger.grant_problem(blocks))

    def _blocks_problem(self, blocks: tuple[int, ...]) -> str | None:
        if blocks and not 0 <= min(blocks) <= max(blocks) < self.num_blocks:
            return f"a KV block is not one of {self.num_blocks}"
        return None

    def _chunk_problem(self, sequence: Sequence, tokens: int) -> str | None:
        if sequence.chunk:
            return "a chunk is ordered twice for one step"
        end = sequence.computed + tokens
        if tokens < 1 or end > sequence.prompt_length:
            return (
                f"a chunk of {tokens} does not fit the {sequence.prompt_length - sequence.computed} prompt tokens left"
            )
        if end > len(sequence.blocks) * self.info.block_size:
            return "a chunk runs past the blocks granted"
        return None


def _admitted(admission: Admission) -> Sequence:
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
        top_n=admission.top_n,
        prompt_top_n=admission.prompt_top_n,
        # The first token has nothing before it, and cached ones are not computed again: NaN, as the contract says.
        prompt_scores=PromptScores(
            admission.slot, [float("nan")] * scored, [((), ())] * scored if admission.prompt_top_n else None
        )
        if admission.prompt_logprobs
        else None,
        building=admission.matcher,
        enders=admission.stopping.eos_token_ids | admission.stopping.stop_token_ids,
        plain_from=len(admission.prompt) + admission.stopping.min_new_tokens if _is_plain(admission) else math.inf,
    )


def _is_plain(admission: Admission) -> bool:
    # Where nothing is drawn the seed means nothing.
    return replace(admission.sampling, seed=0) == PLAIN and not admission.top_n and admission.grammar is None


def _finish_reason(sequence: Sequence, token_id: int, *, ends: bool) -> FinishReason | None:
    """LENGTH wins over EOS_TOKEN, which wins over STOP_TOKEN, on the same token."""
    stopping = sequence.stopping
    if sequence.generated >= stopping.max_new_tokens:
        return FinishReason.LENGTH
    if ends:
        return FinishReason.EOS_TOKEN
    if sequence.generated <= stopping.min_new_tokens:
        return None
    if token_id in stopping.eos_token_ids:
        return FinishReason.EOS_TOKEN
    if token_id in stopping.stop_token_ids:
        return FinishReason.STOP_TOKEN
    return None
