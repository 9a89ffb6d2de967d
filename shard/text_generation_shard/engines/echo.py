"""Repeats the prompt at a set pace, with no model: for tests, demos, and load tests of everything above the engine.

New token i of a sequence is prompt token i modulo the prompt's length, counted over everything generated since the
request began, so that a preempted sequence goes on where it was. It keeps the contract of a real engine to the letter:
KV blocks, grants, chunks, stopping. It holds its client to it as well: blocks given twice, or said to hold tokens that they
do not, fail the sequence they were given to (`kv_ledger`). Given a model folder with a tokenizer.json it also keeps to
grammars: it ends as soon as it may, closes what is open, and repeats its prompt only where that is allowed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from text_generation_proto.values import FailureCode
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import (
    EngineInfo,
    Failure,
    InProcess,
    Orders,
    Scheduling,
    StepResult,
    TopTokens,
    WarmUpLimits,
)
from text_generation_shard.grammar import Grammars, load_grammars
from text_generation_shard.step.chosen import Chosen, ChosenToken
from text_generation_shard.step.kv_ledger import KVLedger
from text_generation_shard.step.masks import Mask, TokenMasks
from text_generation_shard.step.sequence import Row, Sequence
from text_generation_shard.step.table import SequenceTable

BLOCK_SIZE = 16
VOCAB_SIZE = 1 << 20
"""Larger than any tokenizer's, so that echo serves with whatever tokenizer the router loads."""
MAX_SLOTS = 1024
LOGPROB = -0.5
"""Log-probability of every echoed token; any constant would do, a round float32 reads well."""


@dataclass
class EchoEngine(InProcess):
    """See the module."""

    info: EngineInfo
    num_blocks: int
    step_s: float
    prefill_s: float
    decode_s: float
    fail_token: int
    fail_step_token: int
    grammars: Grammars | None = None
    _table: SequenceTable = field(init=False)
    _masks: TokenMasks | None = field(init=False)

    @classmethod
    def build(cls, config: ShardConfig) -> EchoEngine:
        grammars = load_grammars(config.model_path)
        info = EngineInfo(
            engine="echo",
            model_id=config.model_id or config.model_path or "echo",
            model_type="",
            dtype="float32",
            device="cpu",
            scheduling=Scheduling.STEP,
            vocab_size=VOCAB_SIZE,
            max_sequence_length=config.echo_max_sequence_length,
            max_slots=config.max_batch_size or MAX_SLOTS,
            block_size=BLOCK_SIZE,
            eos_token_ids=(),
            suggested_prefill_tokens=4096,
            max_top_n_tokens=20,
            grammar_kinds=grammars.kinds if grammars is not None else (),
        )
        return cls(
            info=info,
            num_blocks=config.echo_blocks,
            step_s=config.echo_step_ms / 1e3,
            prefill_s=config.echo_prefill_us / 1e6,
            decode_s=config.echo_decode_us / 1e6,
            fail_token=config.echo_fail_token,
            fail_step_token=config.echo_fail_step_token,
            grammars=grammars,
        )

    def __post_init__(self) -> None:
        self._table = SequenceTable(self.info)
        self._masks = None if self.grammars is None else TokenMasks(self.grammars, self.grammars.vocab_size)

    def warm_up(self, limits: WarmUpLimits) -> int:
        self._table.clear()
        if limits.max_batch_total_tokens:
            self.num_blocks = limits.max_batch_total_tokens // BLOCK_SIZE
        self._table.num_blocks = self.num_blocks
        self._table.ledger = KVLedger(self.num_blocks, BLOCK_SIZE)
        return self.num_blocks

    def apply(self, orders: Orders) -> list[Failure]:
        return self._table.apply(orders)

    def step(self) -> StepResult | None:
        step = self._table.rows()
        rows = step.others
        if not rows:
            return None
        started = time.perf_counter()
        sampling = [row.sequence for row in rows if row.samples]
        constrained = [sequence for sequence in sampling if sequence.matcher is not None]
        pending = self._masks.start(constrained) if constrained and self._masks is not None else None
        if (pace := self._pace(rows)) > 0:
            # A pause from the start of the step, not after it: the pace set is the pace kept.
            time.sleep(pace)
        masks = {} if pending is None else pending.result()
        chosen = [self._choose(sequence, masks.get(sequence.slot)) for sequence in sampling]
        if any(token.token_id == self.fail_step_token for token in chosen):
            return self._table.fail(step, "the step failed, as the echo engine was told")
        for row in rows:
            self._score_prompt(row)
        self._table.begin(step)
        result = self._table.advance(step, Chosen.of(chosen))
        self._add_top_tokens(rows, result)
        result.forward_ns = int((time.perf_counter() - started) * 1e9)
        return result

    @property
    def running(self) -> int:
        return len(self._table)

    @property
    def used_blocks(self) -> int:
        return self._table.used_blocks

    def reset(self) -> None:
        self._table.clear()

    def close(self) -> None:
        self._table.clear()
        if self.grammars is not None:
            self.grammars.close()
        if self._masks is not None:
            self._masks.close()

    def _pace(self, rows: list[Row]) -> float:
        """Seconds that a step over `rows` is to take."""
        prompts = [row.length for row in rows if row.prefills]
        return self.step_s + self.prefill_s * sum(prompts) + self.decode_s * (len(rows) - len(prompts))

    def _choose(self, sequence: Sequence, mask: Mask | None) -> ChosenToken:
        period = sequence.prompt_length - sequence.generated_before
        token = sequence.tokens[(len(sequence.tokens) - period) % period]
        if token == self.fail_token:
            return ChosenToken(token, LOGPROB, failure="this token fails, as the echo engine was told")
        return ChosenToken(token, LOGPROB) if mask is None else self._choose_allowed(token, sequence, mask)

    def _choose_allowed(self, usual: int, sequence: Sequence, mask: Mask) -> ChosenToken:
        if mask.failure is not None or self.grammars is None:
            return ChosenToken(usual, LOGPROB, mask.failure, FailureCode.INVALID)
        if mask.is_complete or (mask.may_end and not sequence.suppressed):
            end = min(sequence.stopping.eos_token_ids or self.grammars.end_token_ids)
            return ChosenToken(end, LOGPROB, ends=True)
        for token in (*self.grammars.closing_token_ids, usual):
            if token < mask.allowed.size and mask.allowed[token]:
                return ChosenToken(token, LOGPROB)
        allowed = np.flatnonzero(mask.allowed).tolist()
        return ChosenToken(
            next((token for token in allowed if not self.grammars.is_special(token)), allowed[0]), LOGPROB
        )

    def _score_prompt(self, row: Row) -> None:
        if (scores := row.sequence.prompt_scores) is None:
            return
        # A position tells of the token after it, as a model's does: of the first one computed nothing is told.
        for position in range(row.start + 1, min(row.start + row.length + 1, len(scores.logprobs))):
            scores.logprobs[position] = LOGPROB
            if scores.tops is not None:
                scores.tops[position] = _neighbours(row.sequence.tokens[position], row.sequence.prompt_top_n)

    def _add_top_tokens(self, rows: list[Row], result: StepResult) -> None:
        wanted = {row.sequence.slot: row.sequence.top_n for row in rows if row.sequence.top_n}
        for slot, token in zip(result.slots, result.token_ids, strict=True):
            if n := wanted.get(slot, 0):
                result.top_tokens.append(TopTokens(slot, 0, *_neighbours(token, n)))


def _neighbours(token: int, n: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """A token, then its neighbours in the vocabulary, each half as likely as the one before: ids and logprobs."""
    return tuple((token + i) % VOCAB_SIZE for i in range(n)), tuple(LOGPROB - 0.7 * i for i in range(n))
