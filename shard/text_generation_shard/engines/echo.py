"""Echoes the prompt at a configured pace, without a model: for tests, demos, and load tests of everything above the engine.

New token i of a sequence is prompt token i modulo the prompt's length, counted from the request's first new token, so that a
preempted sequence continues where it was. With a LoRA adapter the prompt comes backwards; `--lora-adapters` gives names, no folder
is read. It keeps the contract of a real engine exactly: KV blocks, chunks, stopping. With a model folder that has a tokenizer.json
it supports grammars: it ends as soon as allowed, closes what is open, and echoes the prompt where the grammar allows it.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from text_generation_common.lora import parse_adapters
from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.values import FailureCode, WarmUpLimits
from text_generation_shard.adapters import LoraAdapter
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import (
    EngineInfo,
    Failure,
    Orders,
    Scheduling,
    StepResult,
    SynchronousEngine,
    TopTokens,
)
from text_generation_shard.grammar import Grammars, load_grammars
from text_generation_shard.step.masks import Mask, TokenMasks
from text_generation_shard.step.sequence import SamplerOutput, Sequence, StepRow
from text_generation_shard.step.table import SequenceTable

BLOCK_SIZE = 16
VOCAB_SIZE = 1 << 20
"""Larger than any tokenizer's vocabulary: echo works with every tokenizer of the router."""
MAX_SLOTS = 1024
LOGPROB = -0.5
"""Log-probability of every echoed token: an arbitrary constant, exact in float32."""


@dataclass
class EchoEngine(SynchronousEngine):
    info: EngineInfo
    num_blocks: int
    step_s: float
    prefill_s: float
    decode_s: float
    grammars: Grammars | None = None
    table: SequenceTable = field(init=False)
    _masks: TokenMasks | None = field(init=False)

    @classmethod
    def build(cls, config: ShardConfig) -> Self:
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
            adapters=tuple(adapter.name for adapter in parse_adapters(config.lora_adapters)),
            max_loras=config.lora_slots,
            scores_generated=True,
        )
        return cls(
            info=info,
            num_blocks=config.echo_blocks,
            step_s=config.echo_step_ms / 1e3,
            prefill_s=config.echo_prefill_us / 1e6,
            decode_s=config.echo_decode_us / 1e6,
            grammars=grammars,
        )

    def __post_init__(self) -> None:
        self.table = SequenceTable(self.info)
        self._masks = None if self.grammars is None else TokenMasks(self.grammars, self.grammars.vocab_size)

    def warm_up(self, limits: WarmUpLimits) -> tuple[CacheGroup, ...]:
        self.table.clear()
        if limits.max_batch_total_tokens:
            self.num_blocks = limits.max_batch_total_tokens // BLOCK_SIZE
        self.table.groups = (CacheGroup(self.num_blocks),)
        return self.table.groups

    def apply(self, orders: Orders) -> list[Failure]:
        return self.table.apply(orders)

    def step(self) -> StepResult | None:
        step = self.table.rows()
        rows = step.others
        if not rows:
            return StepResult() if self.table.wait_beside() else None
        started = time.perf_counter()
        sampling = [row.sequence for row in rows if row.samples]
        constrained = [sequence for sequence in sampling if sequence.matcher is not None]
        pending = self._masks.start(constrained) if constrained and self._masks is not None else None
        if (pace := self._pace(rows)) > 0:
            # Sleep beside the other work, not after it, so that the step takes the configured time.
            time.sleep(pace)
        masks = {} if pending is None else pending.result()
        output = self.sample(sampling, masks)
        for row in rows:
            self._score_prompt(row)
            self._score_generated(row)
        self.table.begin(step)
        self.table.retract(sampling[index] for index in output.late)
        result = self.table.advance(step, output)
        wanted = {row.sequence.slot: row.sequence.top_n for row in rows if row.sequence.top_n}
        for slot, token in zip(result.slots, result.token_ids, strict=True):
            if n := wanted.get(slot, 0):
                result.top_tokens.append(TopTokens(slot, 0, *_neighbours(token, n)))
        result.forward_ns = int((time.perf_counter() - started) * 1e9)
        return result

    def set_adapter(self, name: str, adapter: LoraAdapter | None) -> Iterator[None]:
        self.info = self.table.set_adapter(name, held=adapter is not None)
        while adapter is None and self.table.uses(name):
            yield

    @property
    def running(self) -> int:
        return len(self.table)

    @property
    def used_blocks(self) -> int:
        return self.table.used_blocks

    @property
    def prefilling(self) -> int:
        return self.table.prefilling

    def reset(self) -> None:
        self.table.clear()

    def close(self) -> None:
        self.table.clear()
        if self.grammars is not None:
            self.grammars.close()
        if self._masks is not None:
            self._masks.close()

    def _pace(self, rows: list[StepRow]) -> float:
        """Return the configured duration of a step over `rows`, in seconds."""
        prompts = [row.length for row in rows if row.prefills]
        return self.step_s + self.prefill_s * sum(prompts) + self.decode_s * (len(rows) - len(prompts))

    def sample(self, sequences: list[Sequence], masks: dict[int, Mask]) -> SamplerOutput:
        output = SamplerOutput([], [LOGPROB] * len(sequences))
        for index, sequence in enumerate(sequences):
            period = sequence.prompt_length - sequence.generated_before
            index_in_prompt = (len(sequence.tokens) - period) % period
            token = sequence.tokens[period - 1 - index_in_prompt if sequence.adapter else index_in_prompt]
            mask = masks.get(sequence.slot)
            if sequence.matcher is not None and mask is None:
                output.late.add(index)
            if mask is not None and self.grammars is not None:
                if mask.failure is not None:
                    output.failures[index] = (FailureCode.GRAMMAR, mask.failure)
                elif mask.is_complete or (mask.may_end and not sequence.suppressed):
                    token = min(sequence.stopping.eos_token_ids or self.grammars.end_token_ids)
                    output.grammar_ended.add(index)
                else:
                    token = _choose_allowed(token, mask, self.grammars)
            output.token_ids.append(token)
        return output

    def _score_prompt(self, row: StepRow) -> None:
        if (scores := row.sequence.prompt_scores) is None:
            return
        # A position gives the log-probability of the token after it, as in a model: the first one computed has none.
        for position in range(row.start + 1, min(row.start + row.length + 1, len(scores.logprobs))):
            scores.logprobs[position] = LOGPROB
            if scores.tops is not None:
                scores.tops[position] = _neighbours(row.sequence.tokens[position], row.sequence.prompt_top_n)

    def _score_generated(self, row: StepRow) -> None:
        if (replay := row.sequence.replay) is None:
            return
        for position in replay.predicted(row.start, row.length):
            walker, mask = replay.walker, replay.mask(self._masks)
            if mask is None or mask.failure is None:
                (drawn,) = self.sample([walker], {} if mask is None else {walker.slot: mask}).token_ids
                is_drawn = drawn == replay.tokens[position]
                replay.write(position, LOGPROB if is_drawn else -math.inf, drawn, LOGPROB)
            replay.advance()


def _neighbours(token: int, n: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return ids and logprobs of `token` and the ids after it, each half as probable as the one before."""
    return tuple((token + i) % VOCAB_SIZE for i in range(n)), tuple(LOGPROB - 0.7 * i for i in range(n))


def _choose_allowed(echoed: int, mask: Mask, grammars: Grammars) -> int:
    """Return a token that the mask allows: one that closes what is open, else the echoed one, else the first with text."""
    for token in (*grammars.closing_token_ids, echoed):
        if token < mask.allowed.size and mask.allowed[token]:
            return token
    allowed: list[int] = np.flatnonzero(mask.allowed).tolist()
    return next((token for token in allowed if not grammars.is_special(token)), allowed[0])
