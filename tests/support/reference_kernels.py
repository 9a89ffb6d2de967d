"""The kernels of a GPU in plain torch, and engines and runners of a GPU that run with them on a CPU.

The kernels compute in the dtype of their inputs, including float64, but at least in float32; they round once, like the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from reference_ops import dequantized, rms_norm
from torch import Tensor
from torch.nn import functional

from text_generation_shard.adapters import LoraRoom, read_adapter, read_adapters
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines.torch.batch.kv_cache import BLOCK_SIZE, CacheShape
from text_generation_shard.engines.torch.batch.step_plan import StepPlan
from text_generation_shard.engines.torch.build.fp8_cache import fp8_cache
from text_generation_shard.engines.torch.build.native import load_model
from text_generation_shard.engines.torch.build.prepare import engine_info, with_drafts
from text_generation_shard.engines.torch.device.memory import DeviceMemory
from text_generation_shard.engines.torch.engine.engine import TorchEngine
from text_generation_shard.engines.torch.engine.executor import Executor
from text_generation_shard.engines.torch.engine.images import ImageSteps
from text_generation_shard.engines.torch.engine.trace import StepTrace
from text_generation_shard.engines.torch.engine.worker import TPWorker
from text_generation_shard.engines.torch.kernels.operands import (
    AdapterStack,
    DecodeStep,
    GatedActivation,
    RopeStep,
)
from text_generation_shard.engines.torch.kernels.packed_weight import PackedWeight
from text_generation_shard.engines.torch.layers import recurrence
from text_generation_shard.engines.torch.layers.adapted_linear import AdapterRows
from text_generation_shard.engines.torch.layers.device_ops import DeviceOps
from text_generation_shard.engines.torch.layers.expert_linear import ExpertLinear, choose_top_k, experts_by_loop
from text_generation_shard.engines.torch.models.huggingface.images import load_images
from text_generation_shard.engines.torch.models.native.config import read_model_config
from text_generation_shard.engines.torch.models.native.decoder import Decoder
from text_generation_shard.engines.torch.models.native.model_config import ModelConfig
from text_generation_shard.engines.torch.models.native.parameters import ModelWeights, empty_weights
from text_generation_shard.engines.torch.parallel.group import ParallelGroup
from text_generation_shard.engines.torch.parallel.tensor_parallel import TensorParallelRank
from text_generation_shard.engines.torch.runner.device_runner import DeviceRunner
from text_generation_shard.grammar import Grammars
from text_generation_shard.step.drafts.drafter import Drafter

CPU = torch.device("cpu")
ALONE = ParallelGroup(TensorParallelRank())


class MaskedRows(AdapterRows):
    """Implements `AdapterRows` by the products of all tokens with all adapters; nothing depends on the values of the indices."""

    def __init__(self, indices: Tensor, count: int) -> None:
        self._masks = [(indices == adapter + 1).unsqueeze(1) for adapter in range(count)]

    def look_up(self, ids: Tensor, stack: AdapterStack) -> Tensor:
        return torch.stack([mask * down[:, ids].t() for mask, down in zip(self._masks, stack.down, strict=True)]).sum(0)

    def begin(self, x: Tensor, stack: AdapterStack, *, beside: bool = True) -> Tensor:
        products = [mask * (x @ down.to(x.dtype).t()) for mask, down in zip(self._masks, stack.down, strict=True)]
        return torch.stack(products).sum(0)

    def end(self, begun: Tensor, stack: AdapterStack, y: Tensor) -> None:
        for mask, up in zip(self._masks, stack.up.to(begun.dtype), strict=True):
            for first, end, part in stack.segments:
                own = begun[:, part * stack.rank : (part + 1) * stack.rank]
                y[:, first:end] += mask * (own @ up[first:end].t())

    def update(self, x: Tensor, stack: AdapterStack, base: Callable[[], Tensor], residual: Tensor) -> Tensor:
        self.end(self.begin(x, stack), stack, residual)
        return base()


class ReferenceKernels:
    """Stands for `DeviceKernels`."""

    adapter_rows = MaskedRows
    fused_tokens = 1
    windows: tuple[int | None, ...] = (None,)
    """Sliding windows of the groups of the cache."""
    route = staticmethod(choose_top_k)
    experts = staticmethod(experts_by_loop)
    convolve = staticmethod(recurrence.convolve)
    scan = staticmethod(recurrence.scan)
    gated_norm = staticmethod(recurrence.gated_norm)

    def __init__(self, scale: float, softcap: float | None = None) -> None:
        self._scale, self._softcap = scale, softcap
        self._chunks: list[list[tuple[int, Tensor, int]]] = []
        """For each group and planned chunk: its tokens, its pages, the number of tokens in the pages."""

    def update_tables(self, cells: Tensor, blocks: Tensor, tables: Tensor) -> None:
        tables.view(-1)[cells.long()] = blocks

    def embed(
        self, ids: Tensor, slots: Tensor, last_tokens: Tensor, table: Tensor, residual: Tensor, scale: float
    ) -> None:
        known = torch.where(ids >= 0, ids, last_tokens[slots.long()])
        residual.copy_(table[known.long()]).mul_(scale)

    def rms_norm(
        self,
        residual: Tensor,
        weight: Tensor | None,
        eps: float,
        out: Tensor,
        update: Tensor | None = None,
        update_weight: Tensor | None = None,
        scale: float = 1.0,
        factor: float = 1.0,
    ) -> None:
        if update is not None:
            if update_weight is not None:
                update = rms_norm(update.to(residual.dtype), update_weight, eps)
            residual.add_(update, alpha=scale).mul_(factor)
        values = residual.to(torch.promote_types(residual.dtype, torch.float32))
        out.copy_(values if weight is None else rms_norm(values, weight, eps))

    def rotate_and_append(
        self,
        qkv: Tensor,
        queries: Tensor,
        step: RopeStep,
        cache_layer: Tensor,
        head_norms: tuple[Tensor, Tensor] | None,
        scales: Tensor | None = None,
    ) -> None:
        heads = qkv.view(qkv.shape[0], -1, step.head_dim)
        unrotated, keys = heads[:, : step.num_heads], heads[:, step.num_heads : step.num_heads + step.num_kv_heads]
        values = heads[:, -step.num_kv_heads :]
        if step.norms_values:
            values = rms_norm(values.to(torch.promote_types(qkv.dtype, torch.float32)), 1.0, step.eps)
        positions = step.positions.long()
        rows = positions if step.rotary_positions is None else step.rotary_positions.long()
        cos, sin = step.table[rows].to(torch.promote_types(qkv.dtype, torch.float32)).unsqueeze(2).unbind(1)
        if head_norms is None:
            rotated_queries, rotated_keys = _rotated(unrotated, cos, sin), _rotated(keys, cos, sin)
        else:
            query_weight, key_weight = head_norms
            rotated_queries = _rotated(rms_norm(unrotated.to(cos.dtype), query_weight, step.eps), cos, sin)
            rotated_keys = _rotated(rms_norm(keys.to(cos.dtype), key_weight, step.eps), cos, sin)
        if step.query_beta:
            passed = torch.log1p((positions // step.query_period).to(rotated_queries.dtype))
            rotated_queries = rotated_queries * (1 + step.query_beta * passed).view(-1, 1, 1)
        queries.copy_(rotated_queries)
        blocks = step.block_tables[step.slots.long(), positions // BLOCK_SIZE].long()
        store(cache_layer, blocks, positions % BLOCK_SIZE, (rotated_keys, values), scales)

    def append(
        self,
        keys: Tensor,
        values: Tensor,
        cache_layer: Tensor,
        positions: Tensor,
        slots: Tensor,
        block_tables: Tensor,
        scales: Tensor | None = None,
    ) -> None:
        blocks, offsets = (
            block_tables[slots.long(), positions.long() // BLOCK_SIZE].long(),
            positions.long() % BLOCK_SIZE,
        )
        widened = [functional.pad(heads, (0, cache_layer.shape[4] - heads.shape[2])) for heads in (keys, values)]
        store(cache_layer, blocks, offsets, [heads.transpose(0, 1) for heads in widened], scales)

    def activate(self, gate_up: Tensor, activation: GatedActivation, out: Tensor) -> None:
        out.copy_(activation(gate_up.to(torch.promote_types(gate_up.dtype, torch.float32))))

    def few_experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: ExpertLinear,
        down: ExpertLinear,
        activation: GatedActivation,
        _few: tuple[Tensor, Tensor],
        *,
        out: Tensor,
        add: bool,
        scale: float,
    ) -> None:
        product = experts_by_loop(x, ids, weights, gate_up, down, activation).mul_(scale)
        out.copy_(out + product if add else product)

    def matvec(
        self,
        x: Tensor,
        weight: Tensor | PackedWeight,
        out: Tensor,
        bias: Tensor | None = None,
        *,
        norm: tuple[Tensor | None, float] = (None, 0.0),
        activation: GatedActivation | None = None,
        add: bool = False,
        scale: float = 1.0,
        normed: Tensor | None = None,
    ) -> None:
        norm_weight, eps = norm
        own = x.to(out.dtype) if norm_weight is None else rms_norm(x, norm_weight, eps)
        if normed is not None:
            normed.copy_(own)
        product = _product(own, weight, bias) * scale
        if activation is not None:
            self.activate(product, activation, out)
        elif add:
            out += product
        else:
            out.copy_(product)

    def decode_attention(
        self,
        queries: Tensor,
        cache_layer: Tensor,
        step: DecodeStep,
        window: int | None,
        out: Tensor,
        sinks: Tensor | None,
        scales: Tensor | None = None,
    ) -> None:
        rules, cache_layer = (window, step.scale, step.softcap, sinks), loaded(cache_layer, scales)
        for row, (position, slot) in enumerate(zip(step.positions.tolist(), step.slots.tolist(), strict=True)):
            own = queries[row : row + 1]
            attended = attend(own, cache_layer, step.block_tables[slot], position + 1, *rules)
            out[row] = narrowed(attended, own, out)

    def plan_chunks(self, plan: StepPlan, columns: Mapping[str, Tensor]) -> None:
        queries, page_ends = plan.column("query_indptr").tolist(), plan.column("page_indptr").tolist()
        rests = plan.column("last_pages").tolist()
        parts = [page_ends[slice(*plan.page_indptr(group))] for group in range(plan.sizes.groups)]
        self._chunks = [
            [
                (
                    queries[chunk + 1] - queries[chunk],
                    columns["pages"][ends[chunk] : ends[chunk + 1]],
                    (ends[chunk + 1] - ends[chunk] - 1) * BLOCK_SIZE + rest,
                )
                for chunk, rest in enumerate(rests)
            ]
            for ends in parts
        ]

    def chunk_attention(
        self,
        queries: Tensor,
        cache_layer: Tensor,
        window: int | None,
        out: Tensor,
        sinks: Tensor | None,
        scales: Tensor | None = None,
        ahead: Tensor | None = None,
    ) -> None:
        at, cache_layer = 0, loaded(cache_layer, scales)
        group = self.windows.index(window) if window in self.windows else 0
        for tokens, pages, length in self._chunks[group]:
            own = queries[at : at + tokens]
            later = None if ahead is None else ahead[at : at + tokens]
            attended = attend(own, cache_layer, pages, length, window, self._scale, self._softcap, sinks, later)
            out[at : at + tokens] = narrowed(attended, own, out)
            at += tokens

    def sample_greedy(
        self, logits: Tensor, slots: Tensor, last_tokens: Tensor, token_ids: Tensor, logprobs: Tensor
    ) -> None:
        chosen, own = greedy(logits)
        token_ids.copy_(chosen)
        logprobs.copy_(own)
        last_tokens[slots.long()] = chosen.int()


def store(
    cache_layer: Tensor, blocks: Tensor, offsets: Tensor, keys_values: Sequence[Tensor], scales: Tensor | None
) -> None:
    """Write keys and values [tokens, KV heads, head_dim], in FP8 at most the largest number."""
    # A cache of latent rows has no place for values.
    for which, heads in enumerate(keys_values[: cache_layer.shape[1]]):
        stored = heads if scales is None else heads / scales[which].unsqueeze(1)
        if cache_layer.dtype.itemsize > 1:
            cache_layer[blocks, which, :, offsets] = stored.to(cache_layer.dtype)
            continue
        largest = torch.finfo(cache_layer.dtype).max
        stored = stored.float().clamp(-largest, largest).to(cache_layer.dtype)
        cache_layer.view(torch.uint8)[blocks, which, :, offsets] = stored.view(torch.uint8)


def narrowed(attended: Tensor, queries: Tensor, out: Tensor) -> Tensor:
    """Return the first columns of each head: the values of latent rows."""
    heads = queries.shape[1]
    return attended.view(len(attended), heads, -1)[..., : out.shape[1] // heads].flatten(1)


def loaded(cache_layer: Tensor, scales: Tensor | None) -> Tensor:
    """Return a cache with its keys and values as numbers that can be multiplied."""
    cache_layer = cache_layer.float() if cache_layer.dtype.itemsize == 1 else cache_layer
    return cache_layer if scales is None else cache_layer * scales.view(2, -1, 1, 1)


def _product(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None) -> Tensor:
    """Return x · weightᵀ (+ bias) in the dtype of x."""
    if isinstance(weight, PackedWeight):
        weight = dequantized(weight)
    product = x @ weight.to(x.dtype).t()
    return product if bias is None else product + bias


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x·cos + rotate_half(x)·sin for `heads` [tokens, heads, head_dim]; cos and sin [tokens, 1, head_dim / 2]."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index of each row's maximum, and its log-probability."""
    best = logits.max(1, keepdim=True).values
    tokens = (logits == best).int().argmax(1)
    return tokens, logits.log_softmax(1).gather(1, tokens[:, None]).squeeze(1)


def attend(
    queries: Tensor,
    cache_layer: Tensor,
    table: Tensor,
    length: int,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    ahead: Tensor | None = None,
) -> Tensor:
    """Attend with the last tokens of a sequence of `length`: `queries` [tokens, heads, head_dim] → [tokens, heads · head_dim].

    Each attends to `ahead` [tokens] later ones, if given.
    """
    dtype = torch.promote_types(queries.dtype, torch.float32)
    queries, blocks = queries.to(dtype), cache_layer[table[: -(-length // BLOCK_SIZE)].long()].to(dtype)
    first = 0 if window is None else max(0, length - queries.shape[0] - window + 1)  # earlier positions may be NaN
    keys, *others = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, first:length]
    values = others[0] if others else keys
    share = queries.shape[1] // keys.shape[0]
    keys, values = keys.repeat_interleave(share, dim=0), values.repeat_interleave(share, dim=0)
    own = torch.arange(length - queries.shape[0], length, device=queries.device).unsqueeze(1)
    seen = torch.arange(first, length, device=queries.device)
    hidden = seen > (own if ahead is None else own + ahead.unsqueeze(1))
    if window is not None:
        hidden |= seen <= own - window
    scores = torch.einsum("thd,hkd->htk", queries, keys) * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, column), dim=-1)
    result = torch.einsum("htk,hkd->thd", scores.softmax(-1)[..., : keys.shape[1]], values)
    return result.flatten(1)


def reference_decoder(
    config: ModelConfig, weights: ModelWeights, dtype: torch.dtype
) -> tuple[ReferenceKernels, Decoder]:
    """Return the decoder of a GPU with reference kernels, and these."""
    kernels = ReferenceKernels(config.attention_scale, config.attention_softcap)
    return kernels, Decoder(config, weights, DeviceOps(kernels, ALONE, dtype), ALONE)


def reference_engine(config: ShardConfig, grammars: Grammars | None = None) -> TorchEngine:
    """Return the engine of a GPU for a native model, on a CPU."""
    model = with_drafts(config, read_model_config(Path(config.model_path)), CPU)
    info = engine_info(config, model, CPU, grammars)
    dtype = getattr(torch, info.dtype)
    with torch.inference_mode():
        adapters = read_adapters(config)
        weights = empty_weights(model, ALONE.tp, CPU, dtype, adapters, LoraRoom.of(config, adapters), on_cpu=False)
        if weights.adapters is not None:
            weights.adapters.read = partial(read_adapter, config=config)
        load_model(config, model, weights)
        weights.process_weights_after_loading()
        kernels, decoder = reference_decoder(model, weights, dtype)
        fp8 = fp8_cache(config, {n: ALONE.tp.kv_heads(each.num_kv_heads) for n, each in enumerate(model.layers)}, CPU)
        shape = CacheShape(weights.layer_shapes, CPU, dtype, info.max_sequence_length, fp8, weights.state_bytes)
        kernels.windows = shape.windows
        encoder = load_images(config, dtype, CPU) if info.max_images else None
        sizes, rotates = (info.max_slots, info.max_sequence_length), encoder is not None and encoder.rotates
        runner = DeviceRunner(
            decoder, kernels, ALONE, shape, *sizes, shifts_positions=rotates, image_levels=model.image_levels
        )
        worker = TPWorker(runner, DeviceMemory(CPU, 0.4), weights.adapters)
        executor = Executor(worker, ALONE, info.max_loras, runs_ahead=True)
        if encoder is not None:
            budget, bidirectional = config.max_batch_image_tokens, runner.bidirectional_images
            executor.images = ImageSteps(encoder, budget, CPU, executor.is_device_broken, bidirectional=bidirectional)
        trace = StepTrace(config.trace_steps) if config.trace_steps else None
        return TorchEngine(info, executor, grammars, trace, Drafter.of(info, runs_ahead=True))
