"""The sequences that an engine holds, and the rows that advance in a step.

Tokens of a sequence, as half-open intervals of positions:

    [0, computed)            KV is in the blocks
    [computed, len(tokens))  known, not computed: prompt to prefill, or the one token sampled last
    len(tokens)              sampled by the step that computes position len(tokens) - 1

A sequence whose whole prompt is computed always has exactly one token to compute: it *decodes*. Before that it *prefills*, only
as far as it was ordered to. Neither goes beyond its blocks: position p needs block p // block_size.

A step has *begun* once its computation has started: its positions count as computed, and the next step can begin too, although only
the device knows the token that it needs. A step is *recorded* once its tokens are known on the host. An engine may be one step
ahead of what is recorded; results for a sequence that was dropped meanwhile are discarded.

If the device keeps the last tokens, a sequence that needs nothing but the most probable token moves to the persistent batch with
its first token. Its results are then reported but not stored: its `computed` and `generated` stop changing.

A decoding sequence may have *drafts*, guesses of its next tokens: the step computes their positions too, and samples the token
after each. A draft is right if it is the token sampled for its position. `advance` records the right ones and the token after
them; the positions behind are not computed, and later steps overwrite their KV. Such a step begins once the last one is recorded.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.values import FailureCode
from text_generation_shard.engine import EngineInfo, Failure, NewSequence, Orders, StepResult
from text_generation_shard.grammar import GrammarError
from text_generation_shard.step import order_checks
from text_generation_shard.step.persistent_batch import PersistentBatch
from text_generation_shard.step.replay import Replay
from text_generation_shard.step.sequence import (
    Draft,
    PersistentRows,
    SamplerOutput,
    Sequence,
    StepRow,
    StepRows,
    finish_reason,
    take_tokens,
)

NO_DRAFTS: Mapping[int, Draft] = {}
WAIT_S = 0.005
"""Longest wait of an engine without rows for what is computed beside it: orders may come meanwhile."""


@dataclass(slots=True)
class SequenceTable:
    """Slots and their sequences. Applies orders and records steps as the contract says; computes nothing."""

    info: EngineInfo
    groups: tuple[CacheGroup, ...] = (CacheGroup(0),)
    """The groups of the KV cache, the first of them full."""
    runs_ahead: bool = False
    """True if the device keeps the last tokens and steps may begin before they are known: enables the persistent batch."""
    drafts: bool = False
    """True if sequences may have drafts: `tokens` are then known in the persistent batch too."""
    most_tokens: int = 1 << 30
    """Tokens of the largest step."""
    sequences: dict[int, Sequence] = field(default_factory=dict)
    """By slot. Changed by the table only."""
    _others: dict[int, Sequence] = field(default_factory=dict)
    """The sequences outside the persistent batch."""
    _chunked: list[Sequence] = field(default_factory=list)
    """Sequences with a chunk ordered for the next step."""
    _without_matcher: list[Sequence] = field(default_factory=list)
    """Sequences whose matcher is being built."""
    _holders: Counter[int] = field(default_factory=Counter)
    """Number of sequences that hold a KV block of the first group; no entry for 0."""
    _prefilled: tuple[int, int] = (0, 0)
    """Prompt tokens in the last two steps."""
    _persistent: PersistentBatch | None = field(init=False)

    def __post_init__(self) -> None:
        self._persistent = PersistentBatch() if self.runs_ahead else None

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def used_blocks(self) -> int:
        """Number of KV blocks of the first group held; a shared block counts once."""
        return len(self._holders)

    @property
    def prefilling(self) -> int:
        """Prompt tokens that the last step waits for: its own, and those of the step before if steps run ahead."""
        before, last = self._prefilled
        return before + last if self.runs_ahead else last

    def uses(self, adapter: str) -> bool:
        return any(sequence.adapter == adapter for sequence in self.sequences.values())

    def set_adapter(self, name: str, *, held: bool) -> EngineInfo:
        """Take sequences with a LoRA adapter, or no more of them; return the new description of the engine."""
        others = tuple(each for each in self.info.adapters if each != name)
        self.info = replace(self.info, adapters=(*others, name) if held else others)
        return self.info

    def clear(self) -> None:
        for slot in list(self.sequences):
            self._remove(slot)
        self._chunked.clear()
        self._without_matcher.clear()

    def apply(self, orders: Orders) -> list[Failure]:
        """Make the changes of `orders`. Drop and return the sequences for which they break the contract."""
        failed: list[Failure] = []
        for slot in orders.release:
            self._remove(slot)
        for new in orders.placements:
            if problem := order_checks.new_sequence_problem(new, self.info, self.groups, self.sequences):
                # A slot in a failure is free afterwards. A sequence placed in a taken slot ends the other one too, or
                # two sequences would share a slot on the wire.
                self._remove(new.slot)
                failed.append(Failure(new.slot, FailureCode.INVALID, problem))
            else:
                self._place(new)
        if self._without_matcher:
            failed += self._take_matchers()
        for group, allocations in enumerate((orders.allocations, *orders.further_allocations)):
            for slot, numbers in allocations:
                # An order may cross a finish on the wire: ignore unknown slots.
                if sequence := self.sequences.get(slot):
                    if problem := order_checks.allocation_problem(
                        self.groups, sequence, group, numbers, self.info.block_size
                    ):
                        failed.append(self.drop(sequence, FailureCode.INVALID, problem))
                    else:
                        self._allocate(sequence, group, numbers)
        for slot, tokens in orders.prefill:
            if sequence := self.sequences.get(slot):
                if problem := order_checks.chunk_problem(sequence, tokens, self.info.block_size):
                    failed.append(self.drop(sequence, FailureCode.INVALID, problem))
                    continue
                self._chunked += [] if sequence.chunk else [sequence]
                sequence.chunk += tokens
        return failed

    def decoding(self) -> list[Sequence]:
        """Return the sequences with new tokens that the next step may continue; their tokens must be known."""
        sequences = self.sequences.values()
        return [each for each in sequences if each.prompt_length < len(each.tokens) <= each.end and each.is_ready]

    def rows(self, drafts: Mapping[int, Draft] = NO_DRAFTS) -> StepRows:
        """Return the rows of the next step: all decoding sequences with room, with `drafts` by slot, then the ordered chunks."""
        for slot in drafts:
            self._leave_persistent(self.sequences[slot])
        persistent = None if self._persistent is None else self._persistent.rows()
        rows = [
            StepRow(sequence, sequence.computed, 1, True)  # noqa: FBT003 – keywords are slower; this runs per row and step
            for sequence in self._others.values()
            if sequence.prompt_length <= sequence.computed < sequence.end and sequence.is_ready
        ]
        for row in rows if drafts else ():
            row.add(drafts.get(row.sequence.slot))
        waiting: list[Sequence] = []
        prompt_tokens = 0
        # Chunks that waited, for an image or a matcher, may be more than a step computes.
        room = self.most_tokens - StepRows(persistent, rows).tokens if self._chunked else 0
        for sequence in self._chunked:
            if self.sequences.get(sequence.slot) is sequence and sequence.chunk:
                length = min(sequence.most_of_chunk, room - prompt_tokens)
                if sequence.has_images:
                    length = sequence.chunk_of_images(length)
                last = sequence.computed + length == sequence.prompt_length
                needs_matcher = last or sequence.replay is not None
                if length <= 0 or (needs_matcher and sequence.pending_matcher is not None):
                    waiting.append(sequence)
                    continue
                row = StepRow(sequence, sequence.computed, length, samples=last)
                row.checkpoint = sequence.take_states(length)
                rows.append(row)
                prompt_tokens += length
                sequence.chunk -= length
                if sequence.chunk:
                    waiting.append(sequence)
        self._chunked = waiting
        self._prefilled = self._prefilled[1], prompt_tokens
        return StepRows(persistent, rows)

    def chunked(self) -> list[Sequence]:
        """Return the sequences with a chunk ordered for the next step."""
        return [each for each in self._chunked if each.is_held and each.chunk]

    def retract(self, late: Iterable[Sequence]) -> None:
        """Count the last position of sequences whose mask is not ready as not computed; the step was started."""
        for sequence in late:
            sequence.computed -= 1

    def wait_beside(self) -> bool:
        """Wait a moment if sequences wait for masks, or for images that are encoded; return False if none does."""
        awaited: list[Future[Any]] = [
            sequence.matcher.beside
            for sequence in self._others.values()
            # The first mask waits for the prompt instead. A mask that became ready since `rows` counts too.
            if sequence.computed >= sequence.prompt_length
            if sequence.matcher is not None and sequence.matcher.beside is not None
        ]
        encoded = (each.pending_images for each in self.chunked() if each.images is not None)
        awaited += filter(None, encoded)
        wait(awaited, WAIT_S, FIRST_COMPLETED)
        return bool(awaited)

    def begin(self, rows: StepRows) -> None:
        """Count the positions of a started step as computed."""
        if rows.persistent is not None and self._persistent is not None:
            self._persistent.begin(rows.persistent)
        for row in rows.others:
            row.sequence.computed += row.length
            row.sequence.state_read, row.sequence.state_behind = row.sequence.state_write, 0

    def advance(self, rows: StepRows, output: SamplerOutput) -> StepResult:
        """Record a step. `output` has a token for each persistent row, then for each other row with `samples`, in order."""
        result = StepResult()
        if rows.persistent is not None:
            self._advance_persistent(rows.persistent, output, result)
        token_ids, failures, grammar_ended, late = output.token_ids, output.failures, output.grammar_ended, output.late
        index = rows.num_persistent - 1
        # This loop runs hundreds of thousands of times a second: it avoids attribute lookups and calls.
        for row in rows.others:
            sequence = row.sequence
            index += row.samples + len(row.drafts)
            if not sequence.is_held or index in late or row.drafts:
                continue
            if row.start < sequence.prompt_length:
                result.prefilled.append((sequence.slot, row.length))
                if not row.samples:
                    continue
            if index in failures:
                result.failed.append(self.drop(sequence, *failures[index]))
                continue
            if sequence.prompt_scores is not None or sequence.replay is not None:
                sequence.report_scores(result)
            token_id = token_ids[index]
            sequence.tokens.append(token_id)
            sequence.generated = generated = sequence.generated + 1
            result.slots.append(sequence.slot)
            result.token_ids.append(token_id)
            result.logprobs.append(output.logprobs[index])
            ended = index in grammar_ended
            may_finish = ended or generated >= sequence.stopping.max_new_tokens or token_id in sequence.stop_ids
            if may_finish and (reason := finish_reason(sequence.stopping, generated, token_id, grammar_ended=ended)):
                result.finished.append((sequence.slot, reason))
                self._remove(sequence.slot)
            elif sequence.matcher is not None:
                sequence.matcher.accept(token_id)
            elif self._persistent is not None:
                self._move_to_persistent(sequence)
        if drafting := rows.drafting:
            self._advance_drafting(drafting, output, result)
        return result

    def _advance_drafting(self, drafting: list[tuple[int, StepRow]], output: SamplerOutput, result: StepResult) -> None:
        result.token_counts = [1] * len(result.slots)
        for first, row in drafting:
            sequence = row.sequence
            if not sequence.is_held:
                continue
            if first in output.failures:
                result.failed.append(self.drop(sequence, *output.failures[first]))
                continue
            count, reason = take_tokens(row, first, output)
            result.slots.append(sequence.slot)
            result.token_counts.append(count)
            result.token_ids += output.token_ids[first : first + count]
            result.logprobs += output.logprobs[first : first + count]
            if reason is not None:
                result.finished.append((sequence.slot, reason))
                self._remove(sequence.slot)

    def _advance_persistent(self, rows: PersistentRows, output: SamplerOutput, result: StepResult) -> None:
        assert self._persistent is not None
        token_ids, logprobs = output.token_ids[: len(rows)], output.logprobs[: len(rows)]
        slots: list[int] = rows.slots.tolist()
        if self.drafts:
            for sequence, token_id in zip(rows.sequences, token_ids, strict=True):
                sequence.tokens.append(token_id)
        gone = set(rows.dropped()) if self._persistent.dropped_since(rows) else set()
        for index, failure in output.failures.items():
            if index < len(rows) and index not in gone:
                result.failed.append(self.drop(rows.sequences[index], *failure))
                gone.add(index)
        for index in rows.may_finish(token_ids):
            sequence, token_id = rows.sequences[index], token_ids[index]
            if not sequence.is_held:
                continue
            # The new token is at position starts + 1, and new tokens are counted from 1 after the prompt.
            generated = int(rows.starts[index]) + 2 - sequence.prompt_length
            if reason := finish_reason(sequence.stopping, generated, token_id, grammar_ended=False):
                result.finished.append((sequence.slot, reason))
                self._remove(sequence.slot)
        if gone:
            left = [index for index in range(len(rows)) if index not in gone]
            slots, token_ids = [slots[index] for index in left], [token_ids[index] for index in left]
            logprobs = [logprobs[index] for index in left]
        result.slots += slots
        result.token_ids += token_ids
        result.logprobs += logprobs

    def fail(self, rows: StepRows, message: str) -> StepResult:
        """Drop the sequences of a step that failed as a whole, and report them."""
        return StepResult(
            failed=[self.drop(sequence, FailureCode.STEP, message) for sequence in rows.sequences if sequence.is_held]
        )

    def _place(self, new: NewSequence) -> None:
        sequence = Replay.begin(new) if new.logprobs.generated else Sequence.of(new)
        if self.groups[-1].is_state:
            *further, states = sequence.further
            sequence.further = tuple(further)
            sequence.state_read, sequence.state_write = states[0], states[-1]
        self.sequences[new.slot] = self._others[new.slot] = sequence
        sequence.update_end(self.info.block_size)
        if sequence.pending_matcher is not None:
            self._without_matcher.append(sequence)
        self._holders.update(sequence.blocks)

    def _move_to_persistent(self, sequence: Sequence) -> None:
        """Move the sequence to the persistent batch if it is greedy from now on; no-op if it was moved.

        A step in progress may still have it as a row of its own.
        """
        if sequence.greedy_from <= sequence.computed + 1 and self._others.pop(sequence.slot, None) is not None:
            assert self._persistent is not None
            self._persistent.join(sequence)

    def _leave_persistent(self, sequence: Sequence) -> None:
        """Take a sequence out of the persistent batch, if it is there; all of its tokens are known."""
        if self._persistent is not None and sequence.slot not in self._others:
            self._persistent.leave(sequence)
            self._others[sequence.slot] = sequence
            sequence.generated = len(sequence.tokens) - sequence.prompt_length
            sequence.computed = len(sequence.tokens) - 1

    def _allocate(self, sequence: Sequence, group: int, numbers: tuple[int, ...]) -> None:
        if self.groups[group].is_state:
            position, block = numbers
            sequence.states_ahead.append((position, block))
            return
        sequence.tables[group].extend(numbers)
        sequence.update_end(self.info.block_size)
        if self._persistent is not None and sequence.slot not in self._others:
            self._persistent.extend(sequence)
        if group == 0:
            self._holders.update(numbers)

    def drop(self, sequence: Sequence, code: FailureCode, message: str) -> Failure:
        """Drop a sequence that cannot go on."""
        self._remove(sequence.slot)
        return Failure(sequence.slot, code, message)

    def _remove(self, slot: int) -> None:
        sequence = self.sequences.pop(slot, None)
        if sequence is None:
            return
        sequence.is_held = False
        if self._others.pop(slot, None) is None and self._persistent is not None:
            self._persistent.on_dropped()
        for pending in (sequence.pending_matcher, sequence.pending_images):
            if pending is not None:
                pending.cancel()
        if sequence.matcher is not None and (mask := sequence.matcher.beside) is not None:
            mask.cancel()
        for block in sequence.blocks:
            if (holders := self._holders[block] - 1) > 0:
                self._holders[block] = holders
            else:
                del self._holders[block]

    def _take_matchers(self) -> list[Failure]:
        """Give sequences the matchers that are built. Drop and return those whose grammar cannot be used."""
        failed: list[Failure] = []
        waiting, self._without_matcher = self._without_matcher, []
        for sequence in waiting:
            future = sequence.pending_matcher
            if future is None or self.sequences.get(sequence.slot) is not sequence:
                continue
            if not future.done():
                self._without_matcher.append(sequence)
            elif error := future.exception():
                message = str(error) if isinstance(error, GrammarError) else "the grammar cannot be read"
                failed.append(self.drop(sequence, FailureCode.GRAMMAR, message))
            else:
                constrained = sequence if sequence.replay is None else sequence.replay.walker
                constrained.matcher, sequence.pending_matcher = future.result(), None
        return failed
