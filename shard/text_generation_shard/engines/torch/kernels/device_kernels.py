"""The kernels of a GPU: our own in Triton, and FlashInfer for most prompt chunks."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.batch.kv_cache import CacheShape
from text_generation_shard.engines.torch.batch.step_plan import StepPlan
from text_generation_shard.engines.torch.kernels.activation import activate
from text_generation_shard.engines.torch.kernels.adapters import GroupedRows
from text_generation_shard.engines.torch.kernels.append import append
from text_generation_shard.engines.torch.kernels.chunk_attention import MAX_HEAD_DIM, PagedChunkAttention
from text_generation_shard.engines.torch.kernels.convolution import convolve
from text_generation_shard.engines.torch.kernels.decode_attention import DecodeAttention
from text_generation_shard.engines.torch.kernels.embedding import embed
from text_generation_shard.engines.torch.kernels.experts import experts
from text_generation_shard.engines.torch.kernels.few_experts import few_experts
from text_generation_shard.engines.torch.kernels.flashinfer_chunks import FLASHINFER_HEAD_DIMS, FlashInferChunks
from text_generation_shard.engines.torch.kernels.flashinfer_compiler import FlashInferCompiler
from text_generation_shard.engines.torch.kernels.gated_norm import gated_norm
from text_generation_shard.engines.torch.kernels.greedy import GreedySampler
from text_generation_shard.engines.torch.kernels.matvec import MAX_ROWS, matvec
from text_generation_shard.engines.torch.kernels.norm import rms_norm
from text_generation_shard.engines.torch.kernels.operands import DecodeStep
from text_generation_shard.engines.torch.kernels.rope import rotate_and_append
from text_generation_shard.engines.torch.kernels.routing import route
from text_generation_shard.engines.torch.kernels.scan import scan
from text_generation_shard.engines.torch.kernels.tables import update_tables

Heads = tuple[int, int, int]
"""Query heads, KV heads, head_dim."""


class DeviceKernels:
    """The kernels by name, with the workspaces of those that have any, for each kind of heads that the layers have.

    `rules` are scale and softcap of the scores of each layer. With `compiles`, FlashInfer's kernels are compiled if they were not.
    Everything called in a forward pass can be captured in a CUDA graph, except `chunk_attention`, which is planned on the host for
    each step.
    """

    adapter_rows = GroupedRows
    update_tables = staticmethod(update_tables)
    embed = staticmethod(embed)
    rms_norm = staticmethod(rms_norm)
    rotate_and_append = staticmethod(rotate_and_append)
    append = staticmethod(append)
    activate = staticmethod(activate)
    matvec = staticmethod(matvec)
    route = staticmethod(route)
    experts = staticmethod(experts)
    few_experts = staticmethod(few_experts)
    convolve = staticmethod(convolve)
    scan = staticmethod(scan)
    gated_norm = staticmethod(gated_norm)

    def __init__(
        self,
        shape: CacheShape,
        rules: Sequence[tuple[float, float | None]],
        vocab_size: int,
        max_slots: int,
        *,
        narrow: bool,
        compiles: bool = True,
    ) -> None:
        # Up to this number of tokens in a step, fused products are faster than separate ones. Measured on an H200: wide products
        # beat cuBLAS only at one row, narrow ones, where launches dominate, at a few.
        self.fused_tokens = MAX_ROWS if narrow else 1
        self._own_chunks: dict[Heads, PagedChunkAttention] = {}
        self._by_flashinfer: dict[Heads, FlashInferChunks] = {}
        """Takes over once its kernels are compiled, but for images, for which it would need a mask in memory."""
        self._chunks: dict[Heads, FlashInferChunks | PagedChunkAttention] = {}
        """The kernels of the planned step."""
        self._decoding: dict[Heads, DecodeAttention] = {}
        layers_of: dict[Heads, list[int]] = {}
        for index, layer in enumerate(shape.layers):
            layers_of.setdefault((layer.num_heads, layer.num_kv_heads, layer.head_dim), []).append(index)
        for heads, layers in layers_of.items():
            if len({rules[index] for index in layers}) > 1:
                raise EngineError("attention is scaled by layer, which is not served on CUDA")
            scale, softcap = rules[layers[0]]
            latent, width = shape.layers[layers[0]].latent, shape.layers[layers[0]].value_dim
            if width > MAX_HEAD_DIM:
                raise EngineError(f"head_dim {width} is not served on CUDA, only up to {MAX_HEAD_DIM}")
            groups = {shape.layers[index].window: shape.groups[index] for index in layers}
            self._own_chunks[heads] = PagedChunkAttention(
                *heads, shape.device, scale=scale, softcap=softcap, groups=groups, latent=latent
            )
            if heads[2] in FLASHINFER_HEAD_DIMS and not latent:
                dtypes = shape.dtype, shape.stored
                chunks = FlashInferChunks(*heads, groups, dtypes, scale=scale, softcap=softcap)
                self._by_flashinfer[heads] = chunks
            self._decoding[heads] = DecodeAttention(*heads, max_slots, shape.device, latent=latent)
        if self._by_flashinfer:
            shapes = [each.shape for each in self._by_flashinfer.values()]
            self._compiler = FlashInferCompiler(shapes, shape.device, compiles=compiles)
        # Decode rows, with their drafts, and the last chunks of prompts.
        self.sample_greedy = GreedySampler(2 * max_slots, vocab_size, shape.device).run

    def plan_chunks(self, plan: StepPlan, columns: Mapping[str, Tensor]) -> None:
        for heads, own in self._own_chunks.items():
            self._chunks[heads] = own
            is_divided = own.plan(plan, columns)
            if not is_divided and heads in self._by_flashinfer and self._compiler.is_done:
                self._chunks[heads] = self._by_flashinfer[heads]
                self._by_flashinfer[heads].plan(plan, columns)

    def chunk_attention(
        self,
        queries: Tensor,
        cache_layer: Tensor,
        window: int | None,
        out: Tensor,
        sinks: Tensor | None,
        scales: Tensor | None,
        ahead: Tensor | None,
    ) -> None:
        heads, rest = _heads(queries, cache_layer), (window, out, sinks, scales)
        if ahead is None:
            self._chunks[heads].run(queries, cache_layer, *rest)
        else:
            self._own_chunks[heads].run(queries, cache_layer, *rest, ahead)

    def decode_attention(
        self,
        queries: Tensor,
        cache_layer: Tensor,
        step: DecodeStep,
        window: int | None,
        out: Tensor,
        sinks: Tensor | None,
        scales: Tensor | None,
    ) -> None:
        self._decoding[_heads(queries, cache_layer)].run(queries, cache_layer, step, window, out, sinks, scales)


def _heads(queries: Tensor, cache_layer: Tensor) -> Heads:
    return queries.shape[1], cache_layer.shape[2], cache_layer.shape[4]
