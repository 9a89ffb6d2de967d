"""The torch engine: Llama-family decoders from Hugging Face safetensors, on CPU or CUDA.

A step is three verbs: launch its forward pass (executor), choose its tokens (sampling), record them (sequences). On a CPU
one follows the other. On a GPU a step is launched before the tokens of the one before it are read, so that the device
never waits for the host:

    host    launch k+1 · read k · choose k+1 │ report k · orders · launch k+2 · read k+1 · choose k+2 │ …
    device  … k ──────────► k+1 ───────────────────────────────────────────► k+2 ──────────

The forward pass takes the tokens of the step before from the device. The choice hangs on what the host knows: penalties,
grammars, what must not end yet; it is launched while the forward pass runs. Where nothing but the most probable token
can be chosen in any row, the device chooses it along with the forward pass. A sequence that has ended with step k is
computed once more in step k+1; what comes of that is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor

from text_generation_shard.chosen import Chosen
from text_generation_shard.engine import (
    EngineInfo,
    Failure,
    FailureCode,
    InProcess,
    InsufficientMemory,
    Orders,
    StepResult,
    TopTokens,
    WarmUpLimits,
)
from text_generation_shard.engines.torch.cuda.marks import Mark, mark
from text_generation_shard.engines.torch.executor import Executor, Launched
from text_generation_shard.engines.torch.history import TokenHistories
from text_generation_shard.engines.torch.scoring import PendingScores, start_scores
from text_generation_shard.engines.torch.trace import StepTrace
from text_generation_shard.engines.torch.warm_up import pool_blocks, worst_step
from text_generation_shard.grammar import Grammars
from text_generation_shard.masks import Mask, TokenMasks
from text_generation_shard.sampling import choose
from text_generation_shard.sampling_rows import SamplingRow, needs_history
from text_generation_shard.sequences import Row, SequenceTable
from text_generation_shard.top_candidates import TopCandidates, top_candidates
from text_generation_shard.upload import download

Masks = dict[int, Mask]


@dataclass(slots=True)
class _Step:
    """A step under way."""

    rows: list[Row]
    started: Mark
    computed: Mark
    launched: Launched | None
    """Until the tokens are chosen: its tensors are large, and nobody needs them longer."""
    masking: Future[Masks] | None = None
    masks: Masks = field(default_factory=dict)
    """Of its rows with a grammar, by slot."""
    chosen: tuple[Tensor, Tensor] | None = None
    """Token ids and logprobs of the rows that sample, on the host once `done` has come."""
    scores: list[PendingScores] = field(default_factory=list)
    asking: list[int] = field(default_factory=list)
    """Which of the rows that sample are told the most probable tokens too, and `tops` of these."""
    tops: TopCandidates | None = None
    done: Mark | None = None


class TorchEngine(InProcess):
    """See the module."""

    def __init__(
        self, info: EngineInfo, executor: Executor, grammars: Grammars | None = None, trace: StepTrace | None = None
    ) -> None:
        self.info = info
        self.grammars = grammars
        self._masks = None if grammars is None else TokenMasks(grammars, info.vocab_size)
        self._executor = executor
        self._trace = trace or StepTrace("")
        self._device = torch.device(info.device)
        self._table = SequenceTable(info)
        self._histories = TokenHistories(self._device)
        self._under_way: _Step | None = None
        """Launched and not read yet, where the executor runs ahead."""

    def warm_up(self, limits: WarmUpLimits) -> int:
        executor = self._executor
        self.reset()
        worst = worst_step(self.info, limits)
        executor.allocate(0)
        executor.begin_measuring()
        try:
            self._allocate(worst.num_blocks)
            self._table.apply(worst.orders)
            rows = self._table.rows()
            self._record(self._choose(self._launch(rows)))
            self.reset()
            # The peak holds the pool of the warm-up step, whose place the real pool takes.
            available = executor.spare_bytes() + worst.num_blocks * executor.block_bytes
            num_blocks = pool_blocks(self.info, limits, executor.block_bytes, available)
            self._allocate(num_blocks)
            executor.ready()
        except torch.OutOfMemoryError:
            raise InsufficientMemory("the largest step does not fit: lower max_batch_prefill_tokens") from None
        finally:
            self.reset()
        return num_blocks

    def apply(self, orders: Orders) -> list[Failure]:
        return self._table.apply(orders)

    def step(self) -> StepResult | None:
        rows = self._table.rows()
        before, self._under_way = self._under_way, None
        if not rows and before is None:
            self._trace.pause()
            return None
        launched = self._launch_or_fail(rows) if rows else StepResult()
        result = StepResult() if before is None else self._record(before)
        if isinstance(launched, _Step):
            launched = self._choose_or_fail(launched)
        if isinstance(launched, StepResult):
            result.failed += launched.failed
        elif self._executor.runs_ahead:
            self._under_way = launched
        else:
            return self._record(launched)
        return result

    @property
    def running(self) -> int:
        return len(self._table)

    @property
    def used_blocks(self) -> int:
        return self._table.used_blocks

    def on_broken(self, tell: Callable[[str], None]) -> None:
        self._executor.on_broken(tell)

    def reset(self) -> None:
        if self._under_way is not None and self._under_way.done is not None:
            self._under_way.done.wait()
        self._under_way = None
        self._trace.pause()
        self._table.clear()
        self._executor.reset()
        self._histories.forget()

    def close(self) -> None:
        self.reset()
        self._executor.close()
        self._trace.close()
        if self.grammars is not None:
            self.grammars.close()
        if self._masks is not None:
            self._masks.close()

    def _allocate(self, num_blocks: int) -> None:
        self._executor.allocate(num_blocks)
        self._table.num_blocks = num_blocks

    def _launch_or_fail(self, rows: list[Row]) -> _Step | StepResult:
        try:
            return self._launch(rows)
        except Exception as error:  # noqa: BLE001 – see `_fail`
            return self._fail(rows, error)

    def _choose_or_fail(self, step: _Step) -> _Step | StepResult:
        try:
            return self._choose(step)
        except Exception as error:  # noqa: BLE001 – see `_fail`
            return self._fail(step.rows, error)

    def _fail(self, rows: list[Row], error: Exception) -> StepResult:
        """Whatever a kernel raises costs this step's sequences, and only those – unless nothing can be computed any more."""
        if self._executor.is_broken_by(error):
            raise error
        return self._table.fail(rows, f"the step failed: {_one_line(error)}")

    @torch.inference_mode()
    def _launch(self, rows: list[Row]) -> _Step:
        ahead = self._executor.runs_ahead
        # On a CPU the masks are computed beside the forward pass; on a GPU they hang on tokens that are not read yet.
        masking = None if ahead else self._start_masks(rows)
        greedy = ahead and all(_is_greedy(row) for row in rows if row.samples)
        launched = self._executor.launch(rows, greedy=greedy)
        self._table.begin(rows)
        return _Step(rows, launched.started, launched.computed, launched, masking)

    @torch.inference_mode()
    def _choose(self, step: _Step) -> _Step:
        """Choose a step's tokens, and have what it brings copied to the host."""
        launched, step.launched = step.launched, None
        assert launched is not None
        step.scores = start_scores(launched, self._executor.logits)
        chosen = launched.chosen
        if launched.logits is not None and chosen is None:
            rows = [row for row in launched.rows if row.samples]
            masking = step.masking or self._start_masks(rows)
            step.masks = {} if masking is None else masking.result()
            self._histories.update(row.sequence for row in rows if needs_history(row.sequence.sampling))
            choices = choose(launched.logits, [self._sampling_row(row, step.masks) for row in rows])
            self._executor.tell_chosen(rows, choices.token_ids)
            step.asking = [index for index, row in enumerate(rows) if row.sequence.top_n]
            if step.asking:
                most = max(rows[index].sequence.top_n for index in step.asking)
                step.tops = top_candidates(choices, step.asking, most)
            chosen = torch.stack((choices.token_ids.int(), choices.logprobs.view(torch.int32)))
        if chosen is not None:
            host = download(chosen)
            step.chosen = host[0], host[1].view(torch.float32)
        step.done = mark(self._device)
        return step

    def _record(self, step: _Step) -> StepResult:
        """Wait for what a step brings, and record it."""
        assert step.done is not None
        self._trace.before_wait()
        step.done.wait()
        self._trace.after_wait(step.rows, step.started, step.done)
        for scores in step.scores:
            scores.finish()
        chosen = Chosen([], []) if step.chosen is None else _read(step.chosen)
        _judge(step, chosen)
        tops = self._top_tokens(step, chosen)
        result = self._table.advance(step.rows, chosen)
        result.top_tokens = tops
        result.forward_ns = step.computed.ns_since(step.started)
        return result

    def _top_tokens(self, step: _Step, chosen: Chosen) -> list[TopTokens]:
        if step.tops is None:
            return []
        rows = [row for row in step.rows if row.samples]
        return [
            TopTokens(rows[index].sequence.slot, 0, *step.tops.top(place, rows[index].sequence.top_n))
            for place, index in enumerate(step.asking)
            if index not in chosen.failures and self._table.holds(rows[index])
        ]

    def _start_masks(self, rows: list[Row]) -> Future[Masks] | None:
        """What the grammars allow next, computed beside whatever else is done.

        If the step fails, so do the sequences whose matchers are in use here: nobody asks these again.
        """
        constrained = [
            row.sequence for row in rows if row.samples and row.sequence.matcher is not None and self._table.holds(row)
        ]
        return self._masks.start(constrained) if constrained and self._masks is not None else None

    def _sampling_row(self, row: Row, masks: Masks) -> SamplingRow:
        sequence = row.sequence
        mask = masks.get(sequence.slot)
        return SamplingRow(
            sampling=sequence.sampling,
            position=len(sequence.tokens),
            last_token=sequence.tokens[-1],
            history=self._histories.tokens(sequence) if needs_history(sequence.sampling) else None,
            generated=sequence.generated_before + sequence.generated,
            # A mask has settled this already.
            suppressed=sequence.suppressed if mask is None else frozenset(),
            allowed=None if mask is None or mask.failure is not None else torch.from_numpy(mask.allowed),
        )


def _is_greedy(row: Row) -> bool:
    """Whether nothing but the most probable token can follow, whatever the step before brings."""
    return row.start + row.length >= row.sequence.plain_from


def _read(chosen: tuple[Tensor, Tensor]) -> Chosen:
    token_ids, logprobs = chosen[0].tolist(), chosen[1].tolist()
    return Chosen(
        token_ids,
        logprobs,
        # A NaN or an infinity among the logits is in their sum, and so in the logprob.
        {
            place: (FailureCode.NUMERICS, "the logits leave no token to choose")
            for place, logprob in enumerate(logprobs)
            if not isfinite(logprob)
        },
    )


def _judge(step: _Step, chosen: Chosen) -> None:
    """Add what the masks say of the tokens chosen under them."""
    if not step.masks:
        return
    for place, row in enumerate(row for row in step.rows if row.samples):
        if mask := step.masks.get(row.sequence.slot):
            if mask.is_complete:
                chosen.ends.add(place)
            if mask.failure is not None:
                chosen.failures[place] = (FailureCode.INVALID, mask.failure)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
