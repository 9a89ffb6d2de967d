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

Where the device knows what was chosen last, a sequence of which nothing but the most probable token is asked becomes
*steady* with its first token: from then on it is a place in columns (steady.py). What its steps bring is told, and not
kept: its `tokens`, `computed` and `generated` stand still. A ledger needs them, and goes with no steady sequences.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from text_generation_proto.values import FailureCode
from text_generation_shard.checks import admission_problem
from text_generation_shard.engine import EngineInfo, Failure, NewSequence, Orders, StepResult
from text_generation_shard.grammar import GrammarError
from text_generation_shard.step.chosen import Chosen
from text_generation_shard.step.kv_ledger import KVLedger
from text_generation_shard.step.sequence import Row, Sequence, admitted, finish_reason
from text_generation_shard.step.steady import SteadyRows, SteadyTable, StepRows


@dataclass(slots=True)
class SequenceTable:
    """Slots and their sequences. Knows the contract's bookkeeping; computes nothing."""

    info: EngineInfo
    num_blocks: int = 0
    ledger: KVLedger | None = None
    """Checks whose each block is and what it holds; None: whoever orders is believed."""
    steady: SteadyTable | None = None
    """Of an engine whose device knows what was chosen last."""
    _sequences: dict[int, Sequence] = field(default_factory=dict)
    _unsteady: dict[int, Sequence] = field(default_factory=dict)
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
                    self._grant(sequence, blocks)
        for slot, tokens in orders.prefill:
            if sequence := self._sequences.get(slot):
                if problem := self._chunk_problem(sequence, tokens):
                    failed.append(self._drop(sequence, FailureCode.INVALID, problem))
                else:
                    sequence.chunk = tokens
                    self._chunked.append(sequence)
        return failed

    def rows(self) -> StepRows:
        """What the next step computes: every decoding sequence with room in its grant, then the ordered chunks."""
        steady = None if self.steady is None else self.steady.rows()
        rows = [
            Row(sequence, sequence.computed, 1, True)  # noqa: FBT003 – once a row, a step
            for sequence in self._unsteady.values()
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
        return StepRows(steady, rows)

    def begin(self, rows: StepRows) -> None:
        """The step of these rows is under way."""
        if rows.steady is not None and self.steady is not None:
            self.steady.begin(rows.steady)
        for row in rows.others:
            row.sequence.computed += row.length

    def advance(self, rows: StepRows, chosen: Chosen) -> StepResult:
        """Record a step begun before: `chosen` has one token for each steady row, then for each with `samples`, in order."""
        result = StepResult()
        if rows.steady is not None:
            self._advance_steady(rows.steady, chosen, result)
        token_ids, failures, ends = chosen.token_ids, chosen.failures, chosen.ends
        place = rows.num_steady - 1
        # Once a row, a step: whatever is looked up here is looked up hundreds of thousands of times a second.
        for row in rows.others:
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
            if may_end and (reason := finish_reason(sequence.stopping, generated, token_id, ends=place in ends)):
                result.finished.append((sequence.slot, reason))
                self._remove(sequence.slot)
            elif sequence.matcher is not None:
                sequence.matcher.accept(token_id)
            elif self.steady is not None:
                self._settle(sequence)
        return result

    def _advance_steady(self, rows: SteadyRows, chosen: Chosen, result: StepResult) -> None:
        assert self.steady is not None
        token_ids, logprobs = chosen.token_ids[: len(rows)], chosen.logprobs[: len(rows)]
        slots: list[int] = rows.slots.tolist()
        gone = set(rows.not_held()) if self.steady.has_lost(rows) else set()
        for place, failure in chosen.failures.items():
            if place < len(rows) and place not in gone:
                result.failed.append(self._drop(rows.sequences[place], *failure))
                gone.add(place)
        for place in rows.remarkable(token_ids):
            sequence, token_id = rows.sequences[place], token_ids[place]
            if not sequence.is_held:
                continue
            # A token follows the one at `starts`, and the prompt comes before the first of them.
            generated = int(rows.starts[place]) + 2 - sequence.prompt_length
            if reason := finish_reason(sequence.stopping, generated, token_id, ends=False):
                result.finished.append((sequence.slot, reason))
                self._remove(sequence.slot)
        if gone:
            left = [place for place in range(len(rows)) if place not in gone]
            slots, token_ids = [slots[place] for place in left], [token_ids[place] for place in left]
            logprobs = [logprobs[place] for place in left]
        result.slots += slots
        result.token_ids += token_ids
        result.logprobs += logprobs

    def fail(self, rows: StepRows, message: str) -> StepResult:
        """Drop the sequences of a step that failed as a whole."""
        return StepResult(
            failed=[self._drop(sequence, FailureCode.STEP, message) for sequence in rows.sequences if sequence.is_held]
        )

    def _admit(self, admission: NewSequence) -> None:
        sequence = self._sequences[admission.slot] = self._unsteady[admission.slot] = admitted(admission)
        sequence.settle_end(self.info.block_size)
        if sequence.building is not None:
            self._building.append(sequence)
        self._hold(sequence.blocks)
        if self.ledger is not None:
            self.ledger.admit(sequence)

    def _settle(self, sequence: Sequence) -> None:
        """It becomes steady, if it is not, and if nothing is asked of it from now on. A step under way has it as a row yet."""
        if sequence.plain_from <= sequence.computed + 1 and self._unsteady.pop(sequence.slot, None) is not None:
            assert self.steady is not None
            self.steady.join(sequence)

    def _grant(self, sequence: Sequence, blocks: tuple[int, ...]) -> None:
        sequence.blocks.extend(blocks)
        sequence.settle_end(self.info.block_size)
        if self.steady is not None and sequence.slot not in self._unsteady:
            self.steady.grant(sequence)
        self._hold(blocks)
        if self.ledger is not None:
            self.ledger.grant(sequence, blocks)

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
        if self._unsteady.pop(slot, None) is None and self.steady is not None:
            self.steady.leave()
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

    def _admission_problem(self, admission: NewSequence) -> str | None:
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
