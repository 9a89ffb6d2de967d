"""The torch engine: Llama-family decoders from Hugging Face safetensors, on CPU or CUDA.

A step is five verbs: lay the rows out flat (batch), plan who attends to what (attention), run the decoder (model), choose
tokens (sampling), record them (sequences).
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor

from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import (
    EngineError,
    EngineInfo,
    Failure,
    FailureCode,
    InProcess,
    InsufficientMemory,
    Orders,
    Scheduling,
    StepResult,
    TopTokens,
    WarmUpLimits,
)
from text_generation_shard.engines.torch.attention import AttentionPlan
from text_generation_shard.engines.torch.batch import build_batch
from text_generation_shard.engines.torch.history import TokenHistories
from text_generation_shard.engines.torch.kv_cache import BLOCK_SIZE, BlockTables, CacheShape, KVCache
from text_generation_shard.engines.torch.memory import keep_freed_memory, peak_memory, reset_peak, total_memory
from text_generation_shard.engines.torch.model import Decoder
from text_generation_shard.engines.torch.model_config import ModelConfig, read_model_config
from text_generation_shard.engines.torch.scoring import score_prompts
from text_generation_shard.engines.torch.warm_up import pool_blocks, worst_step
from text_generation_shard.engines.torch.weights import fill_dummy, load_weights
from text_generation_shard.grammar import Grammars, load_grammars
from text_generation_shard.masks import Mask, TokenMasks
from text_generation_shard.sampling import Choices, choose, top_tokens
from text_generation_shard.sampling_rows import SamplingRow, needs_history
from text_generation_shard.sequences import ChosenToken, Row, SequenceTable

MAX_SLOTS = 256
MAX_TOP_N_TOKENS = 20
SUGGESTED_PREFILL_TOKENS = {"cpu": 512, "cuda": 4096}
"""On CPU, larger chunks compute a prompt no faster and hold decoding up longer."""


class TorchEngine(InProcess):
    """See the module."""

    def __init__(
        self,
        model: Decoder,
        config: ModelConfig,
        info: EngineInfo,
        memory_fraction: float,
        grammars: Grammars | None = None,
    ) -> None:
        self.info = info
        self.grammars = grammars
        self._masks = None if grammars is None else TokenMasks(grammars, info.vocab_size)
        self._model = model
        self._config = config
        self._memory_fraction = memory_fraction
        self._device = torch.device(info.device)
        self._shape = CacheShape(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            device=self._device,
            dtype=getattr(torch, info.dtype),
        )
        widths = [window for window in config.windows if window is not None]
        self._window = max(widths) if len(widths) == config.num_layers else None
        self._cache = KVCache(self._shape, 0)
        self._table = SequenceTable(info)
        self._block_tables = BlockTables(info.max_slots, info.max_sequence_length, self._device)
        self._histories = TokenHistories(self._device)

    @classmethod
    def build(cls, config: ShardConfig) -> TorchEngine:
        """Load the model that `config` names. Raises EngineError, in one line, if it cannot be run."""
        if config.world_size > 1:
            raise EngineError("the torch engine does not split a model over several shards: world_size must be 1")
        if not config.model_path:
            raise EngineError("the torch engine needs model_path, a folder with config.json and *.safetensors")
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        device = _device(config.device)
        if device.type == "cpu":
            keep_freed_memory()
        folder = Path(config.model_path)
        model_config = read_model_config(folder)
        dtype = config.dtype or model_config.dtype
        grammars = load_grammars(config.model_path, model_config.eos_token_ids)
        info = EngineInfo(
            engine="torch",
            model_id=config.model_id or config.model_path,
            model_type=model_config.model_type,
            dtype=dtype,
            device=str(device),
            scheduling=Scheduling.STEP,
            vocab_size=model_config.vocab_size,
            max_sequence_length=model_config.max_sequence_length,
            max_slots=config.max_batch_size or MAX_SLOTS,
            block_size=BLOCK_SIZE,
            eos_token_ids=model_config.eos_token_ids,
            suggested_prefill_tokens=SUGGESTED_PREFILL_TOKENS[device.type],
            max_top_n_tokens=MAX_TOP_N_TOKENS,
            grammar_kinds=grammars.kinds if grammars is not None else (),
        )
        model = _load(model_config, folder, device, dtype, dummy=config.load_format == "dummy")
        fraction = config.cuda_memory_fraction if device.type == "cuda" else config.cpu_memory_fraction
        return cls(model, model_config, info, fraction, grammars)

    def warm_up(self, limits: WarmUpLimits) -> int:
        self.reset()
        worst = worst_step(self.info, limits)
        self._allocate(0)
        reset_peak(self._device)
        try:
            self._allocate(worst.num_blocks)
            self._table.apply(worst.orders)
            self._compute(self._table.rows())
        except torch.OutOfMemoryError:
            raise InsufficientMemory("the largest step does not fit: lower max_batch_prefill_tokens") from None
        finally:
            self.reset()
        # The peak holds the pool of the warm-up step, whose place the real pool takes.
        free = int(total_memory(self._device) * self._memory_fraction) - peak_memory(self._device)
        available = free + worst.num_blocks * self._shape.block_bytes
        self._allocate(pool_blocks(self.info, limits, self._shape.block_bytes, available))
        return self._cache.num_blocks

    def apply(self, orders: Orders) -> list[Failure]:
        return self._table.apply(orders)

    def step(self) -> StepResult | None:
        rows = self._table.rows()
        if not rows:
            return None
        try:
            chosen, top, forward_ns = self._compute(rows)
        except Exception as error:  # noqa: BLE001 – whatever a kernel raises costs this step's sequences, and only those
            return self._table.fail(rows, f"the step failed: {_one_line(error)}")
        result = self._table.advance(rows, chosen)
        result.top_tokens = top
        result.forward_ns = forward_ns
        return result

    @property
    def running(self) -> int:
        return len(self._table)

    @property
    def used_blocks(self) -> int:
        return self._table.used_blocks

    def reset(self) -> None:
        self._table.clear()
        self._block_tables.forget()
        self._histories.forget()

    def close(self) -> None:
        self.reset()
        self._allocate(0)
        del self._model
        if self.grammars is not None:
            self.grammars.close()
        if self._masks is not None:
            self._masks.close()

    def _allocate(self, num_blocks: int) -> None:
        # The old pool goes before the new one comes: they need not fit side by side.
        self._cache = KVCache(self._shape, 0)
        self._cache = KVCache(self._shape, num_blocks)
        self._table.num_blocks = num_blocks

    @torch.inference_mode()
    def _compute(self, rows: list[Row]) -> tuple[list[ChosenToken], list[TopTokens], int]:
        """One forward pass: a token for each row that samples, their top tokens, nanoseconds of the model's part."""
        pending = self._start_masks(rows)
        batch = build_batch(rows, self._block_tables, self._cache, self._window, self._device)
        if batch.entered_blocks.numel():
            self._cache.clear(batch.entered_blocks)
        plan = AttentionPlan(batch, self._block_tables, self._cache, self._shape, self._config)
        started = time.perf_counter_ns()
        hidden = self._model.forward(batch, plan, self._cache)
        sampling = [(index, row) for index, row in enumerate(rows) if row.samples]
        logits: Tensor | None = None
        if sampling:
            places = torch.tensor([batch.last_token(index) for index, _ in sampling], device=self._device)
            logits = self._model.logits(hidden[places])
        forward_ns = time.perf_counter_ns() - started
        score_prompts(rows, batch, hidden, self._model)
        if logits is None:
            return [], [], forward_ns
        masks = {} if pending is None else pending.result()
        choices = choose(logits, [self._sampling_row(row, masks.get(row.sequence.slot)) for _, row in sampling])
        chosen = _chosen_tokens(choices)
        for (_, row), token in zip(sampling, chosen, strict=True):
            if mask := masks.get(row.sequence.slot):
                _judge(token, mask)
        return chosen, _top_tokens(choices, [row for _, row in sampling]), forward_ns

    def _start_masks(self, rows: list[Row]) -> Future[dict[int, Mask]] | None:
        """What the grammars allow, computed beside the forward pass: it hangs on tokens known by now.

        If the step fails, so do the sequences whose matchers are in use here: nobody asks these again.
        """
        constrained = [row.sequence for row in rows if row.samples and row.sequence.matcher is not None]
        return self._masks.start(constrained) if constrained and self._masks is not None else None

    def _sampling_row(self, row: Row, mask: Mask | None) -> SamplingRow:
        sequence = row.sequence
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


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise EngineError(f"device {name!r} is not one of auto, cpu, cuda, cuda:N") from None
    if device.type not in SUGGESTED_PREFILL_TOKENS:
        raise EngineError(f"device {name!r} is not one of auto, cpu, cuda, cuda:N")
    if device.type == "cuda":
        if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
            raise EngineError(f"device {name!r} is not there")
        device = torch.device("cuda", device.index or 0)
    return device


def _load(config: ModelConfig, folder: Path, device: torch.device, dtype: str, *, dummy: bool) -> Decoder:
    with torch.inference_mode():
        model = Decoder(config, device, getattr(torch, dtype))
        if dummy:
            fill_dummy(model.targets())
        else:
            load_weights(folder, model.targets())
        model.seal()
    return model


def _chosen_tokens(choices: Choices) -> list[ChosenToken]:
    return [
        ChosenToken(token_id, logprob) if valid else ChosenToken(0, 0.0, failure="the logits leave no token to choose")
        for token_id, logprob, valid in zip(choices.token_ids, choices.logprobs, choices.valid, strict=True)
    ]


def _judge(token: ChosenToken, mask: Mask) -> None:
    """What a mask says of the token chosen under it."""
    token.ends = mask.is_complete
    if mask.failure is not None:
        token.failure, token.failure_code = mask.failure, FailureCode.INVALID


def _top_tokens(choices: Choices, rows: list[Row]) -> list[TopTokens]:
    return [
        TopTokens(row.sequence.slot, 0, *top_tokens(choices, index, row.sequence.top_n))
        for index, row in enumerate(rows)
        if row.sequence.top_n and choices.valid[index]
    ]


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
