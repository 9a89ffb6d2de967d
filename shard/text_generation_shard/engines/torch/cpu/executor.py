"""The executor for CPUs: builds the batch, plans attention and runs the model within the call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from text_generation_shard.engines.torch.attention.paged import AttentionPlan
from text_generation_shard.engines.torch.cpu.batch import build_batch
from text_generation_shard.engines.torch.cpu.step import CpuStep
from text_generation_shard.engines.torch.device import CpuEvent
from text_generation_shard.engines.torch.executor import Launched
from text_generation_shard.engines.torch.kv_cache import BlockTables, CacheShape, PagedKVCache
from text_generation_shard.engines.torch.memory import peak_memory, reset_peak, total_memory
from text_generation_shard.engines.torch.model.interface import Model
from text_generation_shard.engines.torch.sampling.sampler import SORTING
from text_generation_shard.step.sequence import StepRows


class CpuExecutor:
    """Implements `Executor`. May use `memory_fraction` of the machine's memory, including the weights."""

    runs_ahead = False
    threshold_search = SORTING

    def __init__(
        self, model: Model, shape: CacheShape, max_sequence_length: int, max_slots: int, memory_fraction: float
    ) -> None:
        self._model = model
        self._shape = shape
        self._memory_fraction = memory_fraction
        widths = [layer.window for layer in shape.layers if layer.window is not None]
        self._window = max(widths) if len(widths) == len(shape.layers) else None
        self._cache = PagedKVCache(shape, 0)
        self._block_tables = BlockTables(max_slots, max_sequence_length, shape.device)

    @property
    def block_bytes(self) -> int:
        return self._shape.block_bytes

    def launch(self, rows: StepRows, *, greedy: bool) -> Launched:
        device = self._shape.device
        # There is no persistent batch: a step ends before the next one is scheduled.
        batch = build_batch(rows.others, self._block_tables, self._cache, self._window, device)
        if batch.entered_blocks.numel():
            self._cache.clear(batch.entered_blocks)
        plan = AttentionPlan(batch, self._block_tables, self._cache, self._shape)
        started = CpuEvent()
        hidden = self._model.forward(CpuStep(batch, plan, self._cache))
        sampling = [batch.last_token_index(index) for index, row in enumerate(rows.others) if row.samples]
        logits = self._model.logits(hidden[torch.tensor(sampling, device=device)]) if sampling else None
        return Launched(
            hidden=hidden,
            prefills=[
                (row, [(offset, tile.start, tile.length) for offset, tile in tiles])
                for row, tiles in zip(rows.others, batch.offsets, strict=True)
                if row.prefills
            ],
            logits=logits,
            sampled=None,
            started=started,
            computed=CpuEvent(),
        )

    def logits(self, hidden: Tensor, first: int, end: int) -> Tensor:
        return self._model.logits(hidden[first:end])

    def store_sampled_tokens(self, rows: StepRows, token_ids: Tensor) -> None:
        """Nothing to store: the tokens are known before the next step."""

    def allocate(self, num_blocks: int) -> None:
        # The old pool is freed first: both need not fit at once.
        self._cache = PagedKVCache(self._shape, 0)
        self._cache = PagedKVCache(self._shape, num_blocks)

    def begin_measuring(self) -> None:
        reset_peak()

    def spare_bytes(self) -> int:
        return int(total_memory() * self._memory_fraction) - peak_memory()

    def ready(self, max_tokens: int | None = None) -> None:
        """Nothing to prepare."""

    def is_broken_by(self, error: Exception) -> bool:
        return False

    def on_broken(self, callback: Callable[[str], None]) -> None:
        """Nothing to register: failures are raised by calls."""

    def close(self) -> None:
        self.allocate(0)
        del self._model
