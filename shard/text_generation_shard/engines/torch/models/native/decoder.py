"""The forward pass of a decoder, shaped by its config, for all devices.

Computes the same as transformers' LlamaDecoderLayer and its variants, on a flat batch of tokens. The query, key and value
projections are fused into one product, and so are gate and up.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from text_generation_shard.engines.torch.attention.step import ScoreRules, Step
from text_generation_shard.engines.torch.batch.kv_cache import LayerShape
from text_generation_shard.engines.torch.layers.adapted_linear import AdapterPlaces, StepAdapters
from text_generation_shard.engines.torch.layers.linear import DenseLinear, Linear
from text_generation_shard.engines.torch.layers.mlp import GatedMLP, LayerMLP
from text_generation_shard.engines.torch.layers.norm import HeadNorms, RMSNorm
from text_generation_shard.engines.torch.layers.ops import Ops, ResidualStream
from text_generation_shard.engines.torch.layers.precision import Precision
from text_generation_shard.engines.torch.layers.rope import Rope, RotaryEmbedding
from text_generation_shard.engines.torch.models.native.buffers import Activations, LayerBuffers
from text_generation_shard.engines.torch.models.native.model_config import DecoderNumbers
from text_generation_shard.engines.torch.models.native.state_layer import StateLayer
from text_generation_shard.engines.torch.parallel.group import ParallelGroup


@dataclass(frozen=True, slots=True)
class AttentionPlace:
    """A layer of the cache, and how queries and keys meet there."""

    layer: int
    rotary: RotaryEmbedding
    rules: ScoreRules


@dataclass(eq=False, kw_only=True)
class AttentionPart:
    """The weights of an attention that the forward pass reads."""

    shape: LayerShape
    """The heads of this rank."""
    qkv: Linear
    qkv_width: int
    """Outputs of `qkv`: query heads, key heads, value heads; a gate for each query value follows if `is_gated`."""
    output: Linear
    head_norms: HeadNorms | None
    joint_norms: tuple[RMSNorm, RMSNorm] | None = None
    """The norm of all query heads together, and that of all key heads."""
    sinks: Tensor | None
    """Scores of keys without values, one for each query head."""
    is_gated: bool = False
    """True: the outputs of the heads are multiplied by the sigmoid of the gates."""

    @property
    def buffered_heads(self) -> int:
        """Heads whose queries and outputs have buffers."""
        return 0 if self.shape.latent else self.shape.num_heads

    def attend(
        self,
        ops: Ops,
        step: Step,
        stream: ResidualStream,
        norm: RMSNorm | None,
        place: AttentionPlace,
        own: LayerBuffers,
    ) -> Tensor:
        """Return the attention of the normed stream over a layer of the cache, before its output projection."""
        qkv = ops.norm_linear(stream, norm, self.qkv, own.qkv)
        gates = None
        if self.is_gated:
            ungated = self.qkv_width - self.shape.num_heads * self.shape.head_dim
            qkv, gates = qkv[:, :ungated], qkv[:, ungated:]
        if (norms := self.joint_norms) is not None:
            first_key = len(norms[0].weight)
            ops.norm_rows(qkv[:, :first_key], norms[0])
            ops.norm_rows(qkv[:, first_key : first_key + len(norms[1].weight)], norms[1])
        queries = step.rotate_and_append(place.layer, qkv, place.rotary, self.head_norms, own.queries)
        attended = step.attend(place.layer, queries, place.rules, own.attended)
        return attended if gates is None else attended.mul_(gates.sigmoid())


@dataclass(eq=False, kw_only=True)
class DecoderLayer:
    """The weights of a layer that the forward pass reads. It has attention, a part with a state, both or none; then an MLP or none."""

    attention: AttentionPart | None
    input_norm: RMSNorm | None
    mlp_norm: RMSNorm | None
    after_attention: RMSNorm | None
    """The norm of the output of attention, before it is added to the residual stream."""
    after_mlp: RMSNorm | None
    mlp: LayerMLP | None
    states: StateLayer | None = None
    scale: float = 1.0
    """Factor of the residual stream after the layer."""


@dataclass(eq=False, kw_only=True)
class PredictionPart:
    """The weights that predict the token after the next one: see `prediction_config`."""

    embedding_norm: RMSNorm
    hidden_norm: RMSNorm
    projection: DenseLinear
    hidden_first: bool
    """True: the projection reads the hidden states before the embeddings."""
    rotation: tuple[Rope, int]
    """The rotation of its attention, and the numbers of a head that it reads."""
    score_rules: tuple[float, float | None]
    """Scale and softcap of the scores of its attention."""
    layer: DecoderLayer
    norm: RMSNorm
    head: DenseLinear | None = None
    """None: that of the model. This and those below are of a draft model."""
    tokens: Tensor = field(default_factory=partial(torch.empty, 0))
    """The token of each logit."""
    embedding: Tensor | None = None
    """None: that of the model."""
    taken_before: tuple[int, ...] = ()
    """The layers before which hidden states are taken, which `projection` reads."""
    norm_before_residual: bool = False


@dataclass(eq=False, kw_only=True)
class DecoderWeights:
    """The weights of one rank that the forward pass reads."""

    embedding: Tensor
    layers: Sequence[DecoderLayer]
    rotary: Sequence[RotaryEmbedding]
    """The rotation of each layer with attention."""
    norm: RMSNorm
    head: DenseLinear
    """This rank's rows of the LM head; the weight may be a view of the embedding."""
    precision: Precision
    adapters: StepAdapters | None = None
    """The LoRA adapters, if there are any."""
    embedding_changes: AdapterPlaces | None = None
    head_changes: AdapterPlaces | None = None
    """The places for adapters that change the embedding or the LM head, which tied weights have apart; None if none does."""
    prediction: PredictionPart | None = None

    @property
    def all_layers(self) -> Sequence[DecoderLayer]:
        """The layers, and that of `prediction`."""
        return self.layers if self.prediction is None else [*self.layers, self.prediction.layer]

    def convert(self) -> None:
        """Convert weights of products with normed hidden states to the final precision: see `Precision.after_loading`."""
        layers = self.all_layers
        norms = [self.norm, *(norm for layer in layers for norm in (layer.input_norm, layer.mlp_norm))]
        own = self.prediction
        norms += [] if own is None else [own.norm, own.hidden_norm]
        mlps = [layer.mlp.gate_up for layer in layers if isinstance(layer.mlp, GatedMLP)]
        projections = [layer.attention.qkv for layer in layers if layer.attention is not None]
        inputs = [each for layer in layers if layer.states is not None for each in layer.states.inputs]
        heads = [each for each in (self.head, own and own.head) if each is not None]
        after_norms = [*heads, *projections, *inputs, *mlps]
        self.precision = self.precision.after_loading(norms, after_norms)


class Decoder:
    """Implements `Model` with the weights of one rank of `group`."""

    def __init__(self, config: DecoderNumbers, weights: DecoderWeights, ops: Ops, group: ParallelGroup) -> None:
        self._config = config
        self._weights = weights
        self._ops = ops
        self._group = group
        self._device = weights.embedding.device
        self.predicts = 0 if weights.prediction is None else len(weights.prediction.norm.weight)
        if ops.has_buffers:
            for each in weights.rotary:
                each.fill_table(config.max_sequence_length)
        attentions = [layer.attention for layer in weights.all_layers if layer.attention is not None]
        rules = [(config.attention_scale, config.attention_softcap)] * len(attentions)
        if weights.prediction is not None:
            rules[-1] = weights.prediction.score_rules
        self._places = [
            AttentionPlace(index, rotary, ScoreRules(*own, each.sinks))
            for index, (each, rotary, own) in enumerate(zip(attentions, weights.rotary, rules, strict=True))
        ]
        # Rounded to the dtype of the embedding, as in transformers.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=weights.embedding.dtype))

    def forward(self, step: Step, buffers: Activations | None = None) -> Tensor:
        """Return hidden states, as `Model.forward` does; in `buffers`, if given, where the operations need them."""
        config, weights, ops = self._config, self._weights, self._ops
        if buffers is None:
            buffers = self.activations(step.num_tokens)
        rows = None if weights.adapters is None else weights.adapters.begin(step.adapters, ops.adapter_rows)
        residual = step.embed(weights.embedding, self._embedding_scale, buffers.residual)
        if rows is not None and weights.embedding_changes is not None:
            weights.embedding_changes.add_embedded(rows, step.token_ids(), residual, self._embedding_scale)
        if step.images is not None:
            step.images.embed(residual)
        stream = ResidualStream(residual, buffers.normed, scale=config.residual_scale)
        places, part = iter(self._places), weights.prediction
        before, taken = () if part is None else part.taken_before, []
        for index, layer in enumerate(weights.layers):
            taken += [self._taken(stream) for _ in range(before.count(index))]
            self._add_layer(step, stream, layer, places, buffers.of(index))
            if step.images is not None:
                step.images.add(stream.residual, index)
        if part is not None and before:
            taken += [self._taken(stream) for _ in range(before.count(len(weights.layers)))]
            step.carried = part.projection(torch.cat(taken, dim=1))
        return ops.norm(stream, weights.norm, buffers.normed)

    def _taken(self, stream: ResidualStream) -> Tensor:
        """Return a copy of the stream as it is now."""
        if not self._ops.has_buffers:
            return stream.residual.clone()
        return self._ops.norm(stream, None, torch.empty_like(stream.residual, dtype=self._weights.precision.model))

    def predict(self, step: Step, hidden: Tensor) -> Tensor:
        part, buffers = self._weights.prediction, self.activations(step.num_tokens, self.predicts)
        assert part is not None
        table = self._weights.embedding if part.embedding is None else part.embedding
        embedded = step.embed(table, 1.0 if part.taken_before else self._embedding_scale, buffers.residual)
        if step.images is not None:
            step.images.embed(embedded)
        dtype = self._weights.precision.model
        inputs = [part.embedding_norm(embedded.to(dtype)), part.hidden_norm(hidden.to(dtype))]
        if part.hidden_first:
            inputs.reverse()
        joint, place, own = torch.cat(inputs, dim=1), iter(self._places[-1:]), buffers.of(-1)
        if not part.taken_before:
            stream = ResidualStream(part.projection(joint), buffers.normed)
            self._add_layer(step, stream, part.layer, place, own)
            return self._ops.norm(stream, part.norm, buffers.normed)
        residual = inputs[1] if part.norm_before_residual else hidden
        stream = ResidualStream(residual.to(hidden.dtype, copy=True), buffers.normed)
        joint = joint.to(self._weights.precision.normed)
        self._add_layer(step, stream, part.layer, place, own, ResidualStream(joint, torch.empty_like(joint)))
        normed, step.carried = self._ops.norm(stream, part.norm, buffers.normed), stream.residual
        return normed

    def predicted(self, hidden: Tensor) -> Tensor:
        part = self._weights.prediction
        if not len(hidden) or part is None:
            return hidden.new_empty(0, dtype=torch.int64)
        best = (self.logits(hidden) if part.head is None else part.head(hidden)).argmax(1)
        return part.tokens[best] if part.taken_before else best

    def _add_layer(
        self,
        step: Step,
        stream: ResidualStream,
        layer: DecoderLayer,
        places: Iterator[AttentionPlace],
        own: LayerBuffers,
        inputs: ResidualStream | None = None,
    ) -> None:
        """Add a layer to the stream; with `inputs`, its attention reads these, which are normed."""
        ops, states, attended = self._ops, layer.states, None
        if states is not None:
            projected = states.project(ops, stream, layer.input_norm, own.projected)
        if (attention := layer.attention) is not None:
            reads, norm = (stream, layer.input_norm) if inputs is None else (inputs, None)
            attended = attention.attend(ops, step, reads, norm, next(places), own)
        if states is not None:
            mixed = step.with_states(partial(states.mix, ops), projected, own.mixed)
            self._add_mixed(stream, layer, states, mixed, attended)
        elif attention is not None and attended is not None:
            ops.add_linear(stream, attended, attention.output, layer.after_attention)
        if layer.mlp is not None:
            layer.mlp.add(ops, stream, layer.mlp_norm, layer.after_mlp)
        if layer.scale != 1.0:
            ops.multiply(stream, layer.scale)

    def _add_mixed(
        self, stream: ResidualStream, layer: DecoderLayer, states: StateLayer, mixed: Tensor, attended: Tensor | None
    ) -> None:
        """Add the output of the part with a state, and that of the attention beside it if there is one."""
        if attended is None or layer.attention is None:
            self._ops.add_linear(stream, mixed, states.output, layer.after_attention)
        else:
            self._ops.add(stream, states.output(mixed).add_(layer.attention.output(attended)), layer.after_attention)

    def allocate_states(self, blocks: int) -> None:
        for layer in self._weights.layers:
            if layer.states is not None:
                layer.states.allocate(blocks)

    def state_pools(self) -> list[Tensor]:
        layers = (layer.states for layer in self._weights.layers)
        return [pool for states in layers if states is not None for pool in states.pools]

    def cut_forward(self, max_tokens: int) -> Callable[[Step], Tensor]:
        buffers = self.activations(max_tokens)
        # Attention skips the padding rows, so any finite values do; later steps leave theirs.
        for own in buffers.layers:
            for each in (own.attended, own.mixed):
                if each is not None:
                    each.zero_()
        return lambda step: self.forward(step, buffers.first(step.num_tokens))

    def logits(self, hidden: Tensor, memory: Tensor | None = None, adapters: Tensor | None = None) -> Tensor:
        weights, is_whole = self._weights, self._group.tp.world_size == 1
        logits = weights.head(hidden, memory[: len(hidden)] if is_whole and memory is not None else None)
        if (changes := weights.head_changes) is not None and adapters is not None:
            changes.add_product(self._ops.adapter_rows(adapters, changes.count), hidden, logits)
        if is_whole:
            return self._capped(logits)
        if memory is None:
            memory = self.logits_memory(len(hidden))
        self._group.all_gather_last_dim(logits, memory[: len(hidden)])
        return self._capped(memory[: len(hidden), : self._config.vocab_size])

    def logits_memory(self, rows: int) -> Tensor:
        width = self._group.tp.world_size * self._weights.head.weight.shape[0]
        return torch.empty(rows, width, dtype=torch.float32, device=self._device)

    def activations(self, tokens: int, hidden: int = 0) -> Activations:
        """Allocate uninitialized buffers for a pass of `tokens` tokens, where the operations need them."""
        if not self._ops.has_buffers:
            return Activations()
        layers, precision = self._weights.all_layers, self._weights.precision
        hidden = hidden or self._config.hidden_size

        def empty(width: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(tokens, width, dtype=dtype, device=self._device)

        attentions = [layer.attention for layer in layers if layer.attention is not None]
        parts = [layer.states for layer in layers if layer.states is not None]
        widest = max((each.buffered_heads * each.shape.head_dim for each in attentions), default=0)
        qkv = empty(max((each.qkv_width for each in attentions), default=0), precision.products)
        rotated = None if qkv.dtype == precision.model else empty(widest, precision.model)
        attended = empty(widest, precision.model)
        projected = empty(max((each.projected_width for each in parts), default=0), precision.products)
        mixed = empty(max((each.mixed_width for each in parts), default=0), precision.model)

        def of_layer(heads: int, head_dim: int, qkv_width: int, projected_width: int, mixed_width: int) -> LayerBuffers:
            own, queries = _narrowed(qkv, qkv_width), heads * head_dim
            rows = own[:, :queries] if rotated is None else _narrowed(rotated, queries)
            states = (_narrowed(projected, projected_width), _narrowed(mixed, mixed_width)) if mixed_width else ()
            return LayerBuffers(own, rows.view(tokens, -1, head_dim), _narrowed(attended, queries), *states)

        widths = [_widths(layer) for layer in layers]
        buffers = {each: of_layer(*each) for each in set(widths)}
        return Activations(
            residual=empty(hidden, torch.float32),
            normed=empty(hidden, precision.normed),
            layers=[buffers[each] for each in widths],
        )

    def _capped(self, logits: Tensor) -> Tensor:
        """Return the logits after the last operations of the model, in place."""
        config = self._config
        if config.logits_divisor != 1.0:
            logits.div_(config.logits_divisor)
        if config.final_softcap is not None:
            logits.div_(config.final_softcap).tanh_().mul_(config.final_softcap)
        return logits


def _widths(layer: DecoderLayer) -> tuple[int, int, int, int, int]:
    """Return heads, head_dim and qkv_width of the attention, projected_width and mixed_width of the part with a state."""
    attention, states = layer.attention, layer.states
    heads = (
        (0, 1, 0) if attention is None else (attention.buffered_heads, attention.shape.head_dim, attention.qkv_width)
    )
    return (*heads, 0, 0) if states is None else (*heads, states.projected_width, states.mixed_width)


def _narrowed(buffer: Tensor, width: int) -> Tensor:
    """Return a contiguous [tokens, width] in the memory of `buffer` [tokens, at least width]."""
    return buffer.view(-1)[: len(buffer) * width].view(len(buffer), width)
