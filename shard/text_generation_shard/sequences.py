"""The sequences a step engine holds, and which of them advance in a step.

Tokens of a sequence, as half-open intervals of positions:

    [0, computed)            KV sits in the blocks
    [computed, len(tokens))  known, not computed: prompt still to prefill, or the one token chosen last
    len(tokens)              what the step that computes position len(tokens) - 1 will choose

A sequence whose whole prompt is computed always has exactly one token to compute, so it *decodes*; before that it
*prefills*, only as far as it was ordered to. Neither runs past its grant: position p needs block p // block_size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from text_generation_shard.engine import (
    Admission,
    EngineInfo,
    Failure,
    FailureCode,
    FinishReason,
    Orders,
    Sampling,
    StepResult,
    Stopping,
)


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence: its tokens, how far they are computed, and what it was admitted with."""

    slot: int
    tokens: list[int]
    prompt_length: int
    blocks: list[int]
    computed: int
    generated: int
    """New tokens since this admission."""
    generated_before: int
    """Trailing prompt tokens that were generated before this admission."""
    sampling: Sampling
    stopping: Stopping
    top_n: int
    prompt_logprobs: list[float] | None
    """Filled chunk by chunk while the prompt is computed; None if not asked for."""
    chunk: int = 0
    """Prompt tokens ordered for the next step."""

    @property
    def is_prefilling(self) -> bool:
        return self.computed < self.prompt_length


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence's part in a step: compute positions [start, start + length)."""

    sequence: Sequence
    start: int
    length: int
    samples: bool
    """Whether the step also chooses the token after the last of these positions."""


@dataclass(slots=True)
class ChosenToken:
    """What a row chose, or why it could not."""

    token_id: int
    logprob: float
    failure: str | None = None


@dataclass(slots=True)
class SequenceTable:
    """Slots and their sequences. Knows the contract's bookkeeping; computes nothing."""

    info: EngineInfo
    num_blocks: int = 0
    _sequences: dict[int, Sequence] = field(default_factory=dict)
    _chunked: list[Sequence] = field(default_factory=list)
    """Sequences with a chunk ordered for the next step."""

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def used_blocks(self) -> int:
        """KV blocks held."""
        return sum(len(sequence.blocks) for sequence in self._sequences.values())

    def clear(self) -> None:
        """Drop every sequence."""
        self._sequences.clear()
        self._chunked.clear()

    def apply(self, orders: Orders) -> list[Failure]:
        """Make the changes ordered; the sequences that cannot be as ordered are dropped and returned."""
        failed: list[Failure] = []
        for slot in orders.release:
            self._sequences.pop(slot, None)
        for admission in orders.admit:
            if problem := self._admission_problem(admission):
                # A slot named in a failure is free: an admission into a taken slot costs the tenant its place too,
                # or two sequences would share one name on the wire.
                self._sequences.pop(admission.slot, None)
                failed.append(Failure(admission.slot, FailureCode.INVALID, problem))
            else:
                self._sequences[admission.slot] = _admitted(admission)
        for slot, blocks in orders.grants:
            # A grant may cross a finish on the wire; then nobody needs it.
            if sequence := self._sequences.get(slot):
                if problem := self._blocks_problem(blocks):
                    failed.append(self._drop(sequence, FailureCode.INVALID, problem))
                else:
                    sequence.blocks.extend(blocks)
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
        block_size = self.info.block_size
        rows = [
            Row(sequence, sequence.computed, 1, samples=True)
            for sequence in self._sequences.values()
            if sequence.computed >= sequence.prompt_length and sequence.computed < len(sequence.blocks) * block_size
        ]
        for sequence in self._chunked:
            if self._sequences.get(sequence.slot) is sequence and sequence.chunk:
                last = sequence.computed + sequence.chunk == sequence.prompt_length
                rows.append(Row(sequence, sequence.computed, sequence.chunk, samples=last))
                sequence.chunk = 0
        self._chunked.clear()
        return rows

    def advance(self, rows: list[Row], chosen: list[ChosenToken]) -> StepResult:
        """Record a computed step: `chosen` has one entry for each row with `samples`, in order."""
        result = StepResult()
        tokens = iter(chosen)
        for row in rows:
            sequence = row.sequence
            if sequence.is_prefilling:
                result.prefilled.append((sequence.slot, row.length))
            sequence.computed += row.length
            if not row.samples:
                continue
            token = next(tokens)
            if token.failure is not None:
                result.failed.append(self._drop(sequence, FailureCode.NUMERICS, token.failure))
                continue
            if sequence.prompt_logprobs is not None:
                result.prompt_logprobs.append((sequence.slot, sequence.prompt_logprobs))
                sequence.prompt_logprobs = None
            sequence.tokens.append(token.token_id)
            sequence.generated += 1
            result.slots.append(sequence.slot)
            result.token_ids.append(token.token_id)
            result.logprobs.append(token.logprob)
            if reason := _finish_reason(sequence.stopping, sequence.generated, token.token_id):
                result.finished.append((sequence.slot, reason))
                del self._sequences[sequence.slot]
        return result

    def fail(self, rows: list[Row], message: str) -> StepResult:
        """Drop the sequences of a step that failed as a whole."""
        return StepResult(failed=[self._drop(row.sequence, FailureCode.STEP, message) for row in rows])

    def _drop(self, sequence: Sequence, code: FailureCode, message: str) -> Failure:
        self._sequences.pop(sequence.slot, None)
        return Failure(sequence.slot, code, message)

    def _admission_problem(self, admission: Admission) -> str | None:
        info = self.info
        if not 0 <= admission.slot < info.max_slots:
            return f"slot {admission.slot} is not one of {info.max_slots}"
        if admission.slot in self._sequences:
            return f"slot {admission.slot} is taken"
        if not admission.prompt:
            return "the prompt is empty"
        if max(admission.prompt) >= info.vocab_size:
            return f"a prompt token is outside the vocabulary of {info.vocab_size}"
        if not 0 <= admission.computed_tokens < len(admission.prompt):
            return "computed_tokens must leave at least one prompt token to compute"
        if admission.computed_tokens > len(admission.blocks) * info.block_size:
            return "computed_tokens do not fit in the blocks given"
        if not 0 <= admission.generated_tokens < len(admission.prompt):
            return "generated_tokens must leave at least one prompt token"
        if admission.stopping.max_new_tokens < 1:
            return "max_new_tokens must be at least 1"
        if len(admission.prompt) + admission.stopping.max_new_tokens > info.max_sequence_length:
            return f"prompt and new tokens exceed the model's {info.max_sequence_length} positions"
        if admission.top_n > info.max_top_n_tokens:
            return f"top_n is at most {info.max_top_n_tokens}"
        return _sampling_problem(admission.sampling) or self._blocks_problem(admission.blocks)

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
        # The first token has nothing before it, and cached ones are not computed again: NaN, as the contract says.
        prompt_logprobs=[float("nan")] * (len(admission.prompt) - admission.generated_tokens)
        if admission.prompt_logprobs
        else None,
    )


def _finish_reason(stopping: Stopping, generated: int, token_id: int) -> FinishReason | None:
    """LENGTH wins over EOS_TOKEN, which wins over STOP_TOKEN, on the same token."""
    if generated >= stopping.max_new_tokens:
        return FinishReason.LENGTH
    if token_id in stopping.eos_token_ids:
        return FinishReason.EOS_TOKEN
    if token_id in stopping.stop_token_ids:
        return FinishReason.STOP_TOKEN
    return None


def _sampling_problem(sampling: Sampling) -> str | None:
    # Comparisons are written so that NaN fails them.
    if not 0 < sampling.temperature < float("inf"):
        return "temperature must be positive and finite"
    if not 0 < sampling.top_p <= 1 or not 0 < sampling.typical_p <= 1:
        return "top_p and typical_p must be in (0, 1]"
    if not 0 < sampling.repetition_penalty < float("inf"):
        return "repetition_penalty must be positive and finite"
    if not -2 <= sampling.frequency_penalty <= 2:
        return "frequency_penalty must be in [-2, 2]"
    return None
