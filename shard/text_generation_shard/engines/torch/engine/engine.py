"""The torch engine: Llama-family decoders from Hugging Face safetensors, on CPU or CUDA.

A step is launched (executor), sampled (sampling) and recorded (step.table). On a CPU this happens in order. On a GPU a step
is launched before the tokens of the previous one are read, so that the device never waits for the host:

    host    launch k+1 · read k · sample k+1 │ report k · orders · launch k+2 · read k+1 · sample k+2 │ …
    device  … k ──────────► k+1 ───────────────────────────────────────────► k+2 ──────────

The forward pass reads the tokens of the previous step on the device. Sampling depends on host state: penalties, grammars,
minimum lengths. It is launched while the forward pass runs. If every row is sampled greedily without constraints, the device
samples within the forward pass. A sequence that finished in step k is computed once more in step k+1; that result is dropped.

A step with drafts (step.drafts) begins only once the step before is recorded, and the step after it likewise.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from text_generation_common.one_line import typed_line
from text_generation_common.progress import phase
from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.values import FailureCode, WarmUpLimits
from text_generation_shard.adapters import LoraAdapter
from text_generation_shard.engine import EngineInfo, Failure, InsufficientMemory, Orders, StepResult, SynchronousEngine
from text_generation_shard.engines.torch.device.copies import EventRecorder, PinnedBuffers
from text_generation_shard.engines.torch.engine.executor import Executor
from text_generation_shard.engines.torch.engine.in_flight import StepInFlight
from text_generation_shard.engines.torch.engine.predictions import Predictions
from text_generation_shard.engines.torch.engine.scoring import sampling_row, start_scores, start_token_scores
from text_generation_shard.engines.torch.engine.trace import StepTrace
from text_generation_shard.engines.torch.engine.verification import verifying_rows
from text_generation_shard.engines.torch.engine.warm_up import cache_bytes, cache_groups, deep_step, worst_step
from text_generation_shard.engines.torch.sampling.history import TokenHistories
from text_generation_shard.engines.torch.sampling.penalties import SamplingRow, needs_history
from text_generation_shard.engines.torch.sampling.sampler import sample, top_candidates
from text_generation_shard.grammar import Grammars
from text_generation_shard.step.drafts.drafter import Drafter, drafting_of
from text_generation_shard.step.masks import Mask, TokenMasks
from text_generation_shard.step.sequence import GREEDY, SamplerOutput, StepRow, StepRows
from text_generation_shard.step.table import SequenceTable

Masks = dict[int, Mask]

NO_TOKEN = (FailureCode.NUMERICS, "the logits leave no token to choose")
GREEDY_ROW = SamplingRow(GREEDY, 0, 0)
"""Settings of a persistent row in a step that is not greedy as a whole: the row itself still takes the most probable token."""


class TorchEngine(SynchronousEngine):
    def __init__(
        self,
        info: EngineInfo,
        executor: Executor,
        grammars: Grammars | None = None,
        trace: StepTrace | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.info = info
        self.grammars = grammars
        self._masks = None if grammars is None else TokenMasks(grammars, info.vocab_size, in_step=executor.has_states)
        self._executor = executor
        self._images = executor.images
        if self._images is not None:
            self.decode_images = self._images.encoder.decode
        self._trace = trace
        self._device = torch.device(info.device)
        self._events = EventRecorder(self._device)
        self._table = SequenceTable(info, runs_ahead=executor.runs_ahead, drafts=drafter is not None)
        self.drafter = drafter
        self.predictions = Predictions(executor) if executor.predicts and drafter is not None else None
        if drafter is not None:
            drafter.predictor = self.predictions
        self._recorded_at = 0.0
        """Time of the last record; 0 after a pause."""
        self._histories = TokenHistories(self._device)
        self._downloads = PinnedBuffers(self._device)
        """Sampled tokens are copied here."""
        self._in_flight: StepInFlight | None = None
        """The step that is launched but not yet recorded, if the executor runs ahead."""

    def warm_up(self, limits: WarmUpLimits) -> tuple[CacheGroup, ...]:
        executor = self._executor
        self.reset()
        kinds, block_bytes = executor.kinds, executor.block_bytes
        orders, worst_groups = worst_step(self.info, limits, executor.threshold_search.rows_at_once, kinds)
        self._table.most_tokens = sum(tokens for _, tokens in orders.prefill)
        executor.allocate([0 for _ in kinds])
        executor.begin_measuring()
        try:
            self._allocate(worst_groups)
            self._table.apply(orders)
            rows = self._table.rows()
            with torch.inference_mode(), phase("computing the largest step and compiling its kernels"):
                if self._images is not None:
                    self._images.most_tokens = limits.max_batch_prefill_tokens or self.info.suggested_prefill_tokens
                    self._images.place_largest(rows)
                largest = self._sample(self._launch(rows, adapted=bool(self.info.max_loras)))
                if self.predictions is not None:
                    executor.predict(rows, range(rows.tokens), [0] * rows.tokens)
                self._record(largest)
                self.reset()
                self._table.apply(deep_step(self.info, kinds))
                self._record(self._sample(self._launch(self._table.rows())))
            self.reset()
            # The peak includes the KV cache of the warm-up step, which the final one replaces.
            available = executor.spare_bytes() + cache_bytes(worst_groups, block_bytes)
            if self._images is not None:
                available -= self._images.reserved_bytes
            groups = cache_groups(self.info, limits, kinds, block_bytes, available)
            self._allocate(groups)
            groups = executor.with_host_blocks(self.info, limits, groups)
            executor.ready()
        except torch.OutOfMemoryError:
            raise InsufficientMemory("the largest step does not fit: lower max_batch_prefill_tokens") from None
        finally:
            self.reset()
        return groups

    def apply(self, orders: Orders) -> list[Failure]:
        failed = self._table.apply(orders)
        if any(new.adapter for new in orders.placements):
            self._executor.use_adapters({each.adapter for each in self._table.sequences.values()} - {""})
        for copy in orders.copies:
            self._executor.begin_copy(copy, orders.on_copied)
        return failed

    def set_adapter(self, name: str, adapter: LoraAdapter | None) -> Iterator[None]:
        if adapter is not None:
            yield from self._executor.load_adapter(name, str(adapter.folder))
        self.info = self._table.set_adapter(name, held=adapter is not None)
        if adapter is None:
            while self._table.uses(name):
                yield
            self._executor.drop_adapter(name)

    def step(self) -> StepResult | None:
        result, copied = self._step(), self._executor.copied()
        if copied and result is None:
            result = StepResult()
        if result is not None:
            result.copied = copied
        return result

    @torch.inference_mode()
    def _step(self) -> StepResult | None:
        failed = [] if self._images is None else self._images.advance(self._table)
        before, self._in_flight = self._in_flight, None
        result, rows = None, None
        holds = self._images is not None and self._images.hold(self._table)
        if before is not None and (holds or self._must_record(before)):
            result, before = self._record(before), None
        if not holds:
            rows = self._next_rows() if before is None else self._table.rows()
        if not rows and before is None and result is None:
            self._pause()
            return StepResult(failed=failed) if failed or self._table.wait_beside() else None
        launched = (
            self._or_fail(rows, partial(self._launch, rows, began_ahead=before is not None)) if rows else StepResult()
        )
        if before is not None:
            before.is_last = False
            result = self._record(before)
        result = result or StepResult()
        result.failed += failed
        if isinstance(launched, StepInFlight):
            launched = self._or_fail(launched.rows, partial(self._sample, launched))
        if isinstance(launched, StepResult):
            result.failed += launched.failed
        elif self._executor.runs_ahead:
            self._in_flight = launched
        else:
            result = self._record(launched)
            result.failed += failed
        return result

    def _must_record(self, step: StepInFlight) -> bool:
        """Return True if the next step cannot begin before this one is recorded: either has drafts."""
        drafter, table = self.drafter, self._table
        if drafter is None:
            return False
        if step.rows.drafting:
            return True
        return drafter.may_draft(len(table)) and drafter.pay_after(table.decoding(), prompts=step.rows.prefills)

    def _next_rows(self) -> StepRows:
        """Return the rows of the next step; the last one is recorded."""
        drafter, table = self.drafter, self._table
        if drafter is None or not drafter.may_draft(len(table)):
            return table.rows()
        return table.rows(drafter.drafts(table.decoding()))

    @property
    def running(self) -> int:
        return len(self._table)

    @property
    def used_blocks(self) -> int:
        return self._table.used_blocks

    @property
    def prefilling(self) -> int:
        return self._table.prefilling

    def on_broken(self, callback: Callable[[str], None]) -> None:
        self._executor.on_broken(callback)

    def reset(self) -> None:
        if self._in_flight is not None and self._in_flight.done is not None:
            self._in_flight.done.wait()
        self._in_flight = None
        self._executor.end_copies()
        self._pause()
        self._table.clear()
        self._histories.clear()

    def close(self) -> None:
        self.reset()
        self._executor.close()
        for part in (self._trace, self.grammars, self._masks, self._images):
            if part is not None:
                part.close()

    def _pause(self) -> None:
        self._recorded_at = 0.0
        if self._trace is not None:
            self._trace.pause()

    def _allocate(self, groups: tuple[CacheGroup, ...]) -> None:
        self._executor.allocate([group.num_blocks for group in groups])
        self._table.groups = groups

    def _or_fail(self, rows: StepRows, part: Callable[[], StepInFlight]) -> StepInFlight | StepResult:
        """Run a part of a step. An error fails the sequences of this step only, unless the executor is broken for good."""
        try:
            return part()
        except Exception as error:
            if self._executor.is_broken():
                raise
            return self._table.fail(rows, f"the step failed: {typed_line(error)}")

    def _launch(self, rows: StepRows, *, began_ahead: bool = False, adapted: bool = False) -> StepInFlight:
        if self.predictions is not None:
            self.predictions.forget()
        ahead = self._executor.runs_ahead
        # On a CPU the masks are computed during the forward pass; on a GPU they depend on tokens not read yet.
        masking = None if ahead else self._start_masks(rows)
        greedy = ahead and all(row.is_greedy for row in rows.others if row.samples)
        step = self._executor.launch(rows, greedy=greedy, adapted=adapted)
        step.masking, step.began_ahead = masking, began_ahead
        self._table.begin(rows)
        return step

    def _sample(self, step: StepInFlight) -> StepInFlight:
        """Sample the tokens of a step and start copying its results to the host."""
        output = step.output
        del step.output
        for row, offset in step.prefills:
            if (scores := row.sequence.prompt_scores) is not None:
                step.scores += start_scores(row, scores, offset, output.normed, self._executor.logits)
            if (replay := row.sequence.replay) is not None:
                step.scores += start_token_scores(row, replay, offset, output.normed, self._executor, self._masks)
        packed = output.sampled
        if output.logits is not None and packed is None:
            masking = step.masking or self._start_masks(step.rows)
            masks = {} if masking is None else masking.result()
            rows, first = step.rows.indexed(), step.rows.num_persistent
            if penalized := [row.sequence for _, row in rows if needs_history(row.sequence.sampling)]:
                self._histories.update(penalized)
            settings = [GREEDY_ROW] * first
            for index, row in rows:
                settings += self._sampling_rows(step, index, row, masks)
            sampled = sample(output.logits[: len(settings)], settings, self._executor.threshold_search)
            self._table.retract(step.late.values())
            for index, sequence in step.late.items():
                sampled.token_ids[index] = sequence.tokens[-1]  # the input of its next step, again
            self._executor.store_sampled_tokens(step.rows, sampled.token_ids)
            wanted = [
                (index + place, row, place)
                for index, row in rows
                if row.sequence.top_n and index not in step.late
                for place in range(1 + len(row.drafts))
            ]
            if wanted:
                most = max(row.sequence.top_n for _, row, _ in wanted)
                step.tops = top_candidates(sampled, [index for index, _, _ in wanted], most)
                step.top_token_rows = [(row, place) for _, row, place in wanted]
            packed = torch.cat((sampled.token_ids.int(), sampled.logprobs.view(torch.int32)))
        if packed is not None:
            step.sampled = self._downloads.take(len(packed))
            step.sampled.copy_(packed, non_blocking=True)
        step.done = self._events.record()
        return step

    def _record(self, step: StepInFlight) -> StepResult:
        """Wait for the results of a step and record them."""
        assert step.done is not None
        if self._trace is not None:
            self._trace.before_wait()
        step.done.wait()
        if self._trace is not None:
            self._trace.after_wait(step.rows, step.started, step.done)
        for write in step.scores:
            write()
        chosen = SamplerOutput([], []) if step.sampled is None else _read(step.sampled, step.rows.num_sampling)
        _add_mask_results(step, chosen)
        chosen.late.update(step.late)
        if self.drafter is not None and self.drafter.synthetic is not None:
            self.drafter.synthetic.judge(step.rows, chosen)
        result = self._table.advance(step.rows, chosen)
        result.top_tokens = step.top_tokens(result)
        if self.predictions is not None and step.is_last:
            self.predictions.keep(step.rows)
        self._learn(step, result)
        result.forward_ns = (step.computed or step.done).ns_since(step.started)
        return result

    def _learn(self, step: StepInFlight, result: StepResult) -> None:
        if self.drafter is None:
            return
        now, before = time.perf_counter(), self._recorded_at
        if before and not step.rows.prefills:
            self.drafter.took(step.rows, now - before, began_ahead=step.began_ahead)
        result.drafting = drafting_of(step.rows, result)
        self.drafter.verified(result.drafting)
        self._recorded_at = now

    def _start_masks(self, rows: StepRows) -> Future[Masks] | None:
        """Start the grammar masks of the rows that sample one token. If the step fails, the sequences of these matchers fail too."""
        constrained = [
            row.sequence
            for row in rows.sampling
            if row.sequence.matcher is not None and row.sequence.is_held and not row.drafts
        ]
        return self._masks.start(constrained) if constrained and self._masks is not None else None

    def _sampling_rows(self, step: StepInFlight, index: int, row: StepRow, masks: Masks) -> list[SamplingRow]:
        """Return the settings of the tokens that a row samples, the first with this index, and note their masks in the step."""
        sequence, vocab_size = row.sequence, self.info.vocab_size
        if row.drafts:
            settings, along = verifying_rows(row, self._histories, self._masks, vocab_size)
            step.masks |= {at: mask for at, mask in enumerate(along, index) if mask is not None}
            return settings
        mask = masks.get(sequence.slot)
        if mask is not None:
            step.masks[index] = mask
        elif sequence.matcher is not None:
            step.late[index] = sequence
        history = self._histories.tokens(sequence) if needs_history(sequence.sampling) else None
        return [sampling_row(sequence, mask, history, vocab_size)]


def _read(packed: Tensor, rows: int) -> SamplerOutput:
    """Unpack token ids and logprobs; rows with an invalid logprob are failures."""
    numbers, half = packed.numpy(), len(packed) // 2
    read = SamplerOutput(numbers[:rows].tolist(), numbers[half : half + rows].view(np.float32).tolist())
    # A NaN or infinity among the logits propagates to their sum, to the logprob, and to the sum of all logprobs.
    if not isfinite(sum(read.logprobs)):
        invalid = [index for index, logprob in enumerate(read.logprobs) if not isfinite(logprob)]
        read.failures = dict.fromkeys(invalid, NO_TOKEN)
    return read


def _add_mask_results(step: StepInFlight, chosen: SamplerOutput) -> None:
    """Add the completions and failures reported by the grammar masks."""
    for index, mask in step.masks.items():
        if mask.is_complete:
            chosen.grammar_ended.add(index)
        if mask.failure is not None:
            chosen.failures[index] = (FailureCode.GRAMMAR, mask.failure)
