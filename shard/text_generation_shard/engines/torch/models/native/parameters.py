"""The weights of a decoder, or of one rank's part of it.

Tensor parallelism as in Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053): a rank has some of the heads and some columns of
the MLP, so each layer has two all-reduces. Norms and the embedding are replicated; the rows of the LM head are divided and the
logits gathered.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from text_generation_shard.adapters import LoraAdapter, LoraRoom
from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.batch.kv_cache import LayerShape
from text_generation_shard.engines.torch.layers.linear import DenseLinear, Projection
from text_generation_shard.engines.torch.layers.mlp import DenseMLP, PlainMLP
from text_generation_shard.engines.torch.layers.norm import RMSNorm
from text_generation_shard.engines.torch.layers.precision import Precision
from text_generation_shard.engines.torch.layers.rope import RotaryEmbedding
from text_generation_shard.engines.torch.models.native.adapters import ModelAdapters
from text_generation_shard.engines.torch.models.native.attention import AttentionWeights
from text_generation_shard.engines.torch.models.native.decoder import DecoderLayer, DecoderWeights, PredictionPart
from text_generation_shard.engines.torch.models.native.delta_net import GatedDeltaNet
from text_generation_shard.engines.torch.models.native.experts import Experts, ExpertsBesideMLP, shares_form
from text_generation_shard.engines.torch.models.native.latent_attention import LatentAttention
from text_generation_shard.engines.torch.models.native.mamba import Mamba
from text_generation_shard.engines.torch.models.native.model_config import ModelConfig, PredictionConfig, dequantized
from text_generation_shard.engines.torch.models.native.projections import LayerProjections
from text_generation_shard.engines.torch.models.native.state_config import Multipliers
from text_generation_shard.engines.torch.models.native.state_layer import ShortConvolution
from text_generation_shard.engines.torch.parallel.tensor_parallel import ShardRange, TensorParallelRank
from text_generation_shard.engines.torch.weights.parameter import ParameterShard

StateWeights = GatedDeltaNet | Mamba | ShortConvolution


class LayerWeights(DecoderLayer):
    """Weights of one layer of a checkpoint: its attention or its part with a state, its MLP, and its norms."""

    attention: AttentionWeights | LatentAttention | None
    states: StateWeights | None
    mlp: DenseMLP | Experts | ExpertsBesideMLP | None

    def __init__(  # noqa: PLR0913 – the parts of a layer
        self,
        config: ModelConfig,
        index: int,
        tp: TensorParallelRank,
        device: torch.device,
        precision: Precision,
        adapters: ModelAdapters | None,
        prefix: str = "",
        attention_inputs: int = 0,
    ) -> None:
        """`attention_inputs` of its projections, of a draft model; 0: the hidden size."""
        self._prefix = prefix or f"model.layers.{index}."
        self._config, self._device, self._precision, self._adapters = config, device, precision, adapters
        self._projections = self._projections_of(self._prefix, tp)
        self.attention = None
        if config.states is None or config.states.attention[index]:
            kind = AttentionWeights if config.latent is None else LatentAttention
            projections = self._projections_of(self._prefix, tp, attention_inputs)
            self.attention = kind(config, index, projections, self._norm)
        self.states = self._state_part(index, tp)
        self.mlp = self._mlp(index, tp) if config.states is None or config.states.mlps[index] else None
        self._scalar = torch.empty(1, device=device, dtype=precision.model) if config.family.layer_scalars else None
        self.scale = 1.0
        names, hidden_size = config.family.norms, config.hidden_size
        switches = config.family.norms_after_attention
        before, after = not (switches and self.attention), not switches or self.attention is not None
        self.input_norm = self._norm(hidden_size) if before else None
        # A layer of a single part has a single norm.
        single = not before or (config.states is not None and config.states.family.single_parts)
        self.mlp_norm = self.input_norm if single else self._norm(hidden_size)
        self.after_attention = self._norm(hidden_size) if after and names.after_attention else None
        self.after_mlp = self._norm(hidden_size) if after and names.after_mlp else None

    def _projections_of(self, prefix: str, tp: TensorParallelRank, inputs: int = 0) -> LayerProjections:
        config, hidden_size = self._config, self._config.hidden_size
        return LayerProjections(
            prefix, hidden_size, config.quantization, tp, self._device, self._precision, self._adapters, inputs
        )

    def _state_part(self, index: int, tp: TensorParallelRank) -> StateWeights | None:
        states, eps = self._config.states, self._config.rms_norm_eps
        if states is None or not states.layers[index]:
            return None
        projections = self._projections_of(f"{self._prefix}{states.family.module}.", tp)
        match states.family.kind:
            case "delta_net":
                return GatedDeltaNet(states, eps, projections)
            case "mamba":
                return Mamba(states, eps, projections)
            case "short_convolution":
                return ShortConvolution(states, projections)

    def _mlp(self, index: int, tp: TensorParallelRank) -> DenseMLP | Experts | ExpertsBesideMLP:
        experts, hidden_size, names = self._config.experts, self._config.hidden_size, self._config.family.names
        if experts is None or not experts.layers[index]:
            return self._dense_mlp(names.mlp, self._config.intermediate_size, tp)
        shared = None
        # An adapter changes a shared expert that has products of its own.
        if experts.shared_inner and not (self._adapters is None and shares_form(self._config, self._prefix)):
            shared = self._dense_mlp(experts.family.shared_module, experts.shared_inner, tp)
        sparse = Experts(self._config, self._prefix, tp, self._device, self._precision.model, shared)
        if not experts.family.beside_mlp:
            return sparse
        dense = self._dense_mlp(names.mlp, self._config.intermediate_size, tp)
        return ExpertsBesideMLP(sparse, dense, self._prefix, self._norm, hidden_size)

    def _dense_mlp(self, name: str, inner_size: int, tp: TensorParallelRank) -> DenseMLP:
        config, inner = self._config, tp.even(inner_size, "inner values of the MLP")
        names = config.family.names
        down = self._projections.to_hidden(f"{name}.{names.down}", inner, bias=config.mlp_bias)
        if not config.family.gated_mlp:
            up = self._projections.of_hidden([(f"{name}.{names.up}", inner)], bias=config.mlp_bias)
            return PlainMLP(up, down, self._precision.model)
        gate_up = [(f"{name}.{names.gate}", inner), (f"{name}.{names.up}", inner)]
        fused = f"{name}.{names.gate_up}" if config.family.fused_gate_up else None
        return DenseMLP(self._projections.of_hidden(gate_up, fused, bias=config.mlp_bias), down, config.activation)

    def _norm(self, width: int, factor: float = 1.0) -> RMSNorm:
        config, dtype = self._config, self._precision.model
        zero_centered = config.family.zero_centered_norms
        return RMSNorm(width, config.rms_norm_eps, self._device, dtype, zero_centered=zero_centered, factor=factor)

    @property
    def _norms(self) -> dict[str, RMSNorm]:
        """The norms of the residual stream and of the outputs, by name."""
        names = self._config.family.norms
        norms = {names.before_attention: self.input_norm, names.before_mlp: self.mlp_norm}
        norms |= {names.after_attention or "": self.after_attention, names.after_mlp or "": self.after_mlp}
        return {name: norm for name, norm in norms.items() if norm is not None}

    def named_parameters(self) -> dict[str, ParameterShard | Tensor]:
        parameters: dict[str, ParameterShard | Tensor] = {
            f"{self._prefix}{name}.weight": norm.weight for name, norm in self._norms.items()
        }
        if self._scalar is not None:
            parameters[f"{self._prefix}layer_scalar"] = self._scalar
        for each in self._parts:
            parameters |= each.named_parameters()
        return parameters

    @property
    def _parts(self) -> list[AttentionWeights | LatentAttention | StateWeights | DenseMLP | Experts | ExpertsBesideMLP]:
        return [each for each in (self.attention, self.states, self.mlp) if each is not None]

    def process_weights_after_loading(self) -> None:
        for each in self._parts:
            each.process_weights_after_loading()
        for norm in self._norms.values():
            norm.process_weights_after_loading()
        if self._scalar is not None:
            self.scale = float(self._scalar)
        if self._config.multipliers is not None:
            self._multiply(self._config.multipliers)

    def _multiply(self, multipliers: Multipliers) -> None:
        if isinstance(self.attention, AttentionWeights):
            self.attention.multiply(multipliers)
        if isinstance(self.states, Mamba):
            self.states.multiply(multipliers)
        if isinstance(self.mlp, DenseMLP):
            self.mlp.multiply(multipliers.gate, multipliers.down)

    def pack(self) -> None:
        for each in self._parts:
            each.pack()


class PredictionWeights(PredictionPart):
    """The weights of a predicting layer: a layer like the last one with attention, and what is around it."""

    layer: LayerWeights

    def __init__(
        self, config: PredictionConfig, tp: TensorParallelRank, device: torch.device, precision: Precision
    ) -> None:
        model = config.model
        width, dtype, zero_centered = model.hidden_size, precision.model, model.family.zero_centered_norms
        self.embedding_norm, self.hidden_norm, self.norm = (
            RMSNorm(width, model.rms_norm_eps, device, dtype, zero_centered=zero_centered) for _ in range(3)
        )

        def linear(outputs: int, inputs: int) -> DenseLinear:
            return DenseLinear(torch.empty(outputs, inputs, device=device, dtype=dtype), None, precision.logits)

        is_draft = bool(config.taken_before)
        self.projection = linear(width, config.inputs if is_draft else 2 * width)
        self.hidden_first = config.names.hidden_first
        self.score_rules = model.attention_scale, model.attention_softcap
        prefix = config.names.root + config.names.layer
        self.rotation, joint = config.rotation, 2 * width * is_draft
        self.layer = LayerWeights(model, config.index, tp, device, precision, None, prefix, joint)
        self._config = config
        if is_draft and self.layer.input_norm is not None:
            self.embedding_norm = self.layer.input_norm
            self.taken_before, self.norm_before_residual = config.taken_before, config.norm_before_residual
            if config.has_head:
                self.head = linear(config.draft_vocab_size, width)
            self.tokens = torch.zeros(config.draft_vocab_size, dtype=torch.int64, device=device)
            if config.has_embedding:
                self.embedding = torch.empty(model.vocab_size, width, device=device, dtype=dtype)

    def named_parameters(self) -> dict[str, ParameterShard | Tensor]:
        names = self._config.names
        own: dict[str, RMSNorm | DenseLinear] = {
            names.embedding_norm: self.embedding_norm,
            names.hidden_norm: self.hidden_norm,
            names.projection: self.projection,
            names.norm: self.norm,
        }
        parameters: dict[str, ParameterShard | Tensor] = {
            f"{names.root}{name}.weight": each.weight for name, each in own.items()
        }
        parameters |= {} if self.head is None else {"lm_head.weight": self.head.weight}
        parameters |= {"d2t": self.tokens} if self._config.is_mapped else {}
        parameters |= {} if self.embedding is None else {"embed_tokens.weight": self.embedding}
        return self.layer.named_parameters() | parameters

    def process_weights_after_loading(self) -> None:
        for each in (self.hidden_norm, self.norm, self.layer):
            each.process_weights_after_loading()
        if not self.taken_before:
            self.embedding_norm.process_weights_after_loading()
            return
        self.tokens += torch.arange(len(self.tokens), device=self.tokens.device)
        count = self._config.model.vocab_size
        if self.tokens.min() < 0 or self.tokens.max() >= count:
            raise EngineError(f"d2t of the draft model names tokens outside of the vocabulary of {count}")

    def pack(self) -> None:
        self.layer.pack()
        self.projection.pack()
        if self.head is not None:
            self.head.pack()


def empty_weights(
    config: ModelConfig,
    tp: TensorParallelRank,
    device: torch.device,
    dtype: torch.dtype,
    adapters: Sequence[LoraAdapter] = (),
    room: LoraRoom | None = None,
    *,
    on_cpu: bool,
) -> "ModelWeights":
    """Return the empty weights of a rank; without `room` with places for these adapters alone. Raises EngineError."""
    room = room or LoraRoom(len(adapters), max((each.rank for each in adapters), default=0), takes_others=False)
    if room.slots and config.multipliers is not None:
        raise EngineError(f"LoRA adapters of {config.model_type} models are not served: their projections have factors")
    # On a CPU, small products in bfloat16 take many times as long as in float32.
    found = ModelAdapters(adapters, torch.float32 if on_cpu else dtype, room) if room.slots else None
    if on_cpu:
        # A CPU has no quantized products: weights are dequantized while they load.
        return ModelWeights(dequantized(config), tp, device, Precision.uniform(dtype), found)
    # Weights of FP8 and of experts are so coarse that more bits would not help; products inside latent attention round.
    rounded = any(each is not None for each in (config.quantization, config.experts, config.latent))
    return ModelWeights(config, tp, device, Precision.of(config.hidden_size, dtype, rounded=rounded), found)


class ModelWeights(DecoderWeights):
    """All weights of a rank. Created empty: fill `named_parameters`, then call `process_weights_after_loading`."""

    layers: list[LayerWeights]
    prediction: PredictionWeights | None

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallelRank,
        device: torch.device,
        precision: Precision,
        adapters: ModelAdapters | None,
    ) -> None:
        dtype = precision.model
        self.precision = precision
        """Final after `process_weights_after_loading`."""
        self.adapters: ModelAdapters | None = adapters
        self.layers = [
            LayerWeights(config, index, tp, device, precision, adapters) for index in range(config.num_layers)
        ]
        self.prediction = None
        if config.prediction is not None:
            self.prediction = PredictionWeights(config.prediction, tp, device, precision)
        kinds = [
            (rope, shape.rotated_dim)
            for rope, shape, layer in zip(config.ropes, config.layers, self.layers, strict=True)
            if layer.attention is not None
        ]
        kinds += [] if self.prediction is None else [self.prediction.rotation]
        rotary = {kind: RotaryEmbedding(*kind, device) for kind in set(kinds)}
        self.rotary = [rotary[kind] for kind in kinds]
        self.norm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, device, dtype, zero_centered=config.family.zero_centered_norms
        )
        self._last_norm, self._embedding_name = config.family.names.last_norm, config.family.names.embedding
        self._vocabulary = tp.padded(config.vocab_size)
        rows = -(-config.vocab_size // tp.world_size)
        # Padding rows are zero, and so are their logits; the gather of logits drops them.
        table = torch.zeros(rows * tp.world_size, config.hidden_size, device=device, dtype=dtype)
        self.embedding = table[: config.vocab_size]
        self.tied = config.tie_word_embeddings
        own_rows = slice(tp.rank * rows, (tp.rank + 1) * rows)
        head = table[own_rows] if self.tied else torch.zeros_like(table[own_rows])
        self.head = DenseLinear(head, None, self.precision.logits)
        if adapters is not None:
            self._place_adapters(adapters, config.vocab_size, rows, device)
            adapters.check()

    def _place_adapters(self, adapters: ModelAdapters, vocab_size: int, rows: int, device: torch.device) -> None:
        hidden, weight = ShardRange.whole(self.embedding.shape[1]), f"{self._embedding_name}.weight"
        embedding = Projection(self._embedding_name, hidden, ShardRange.whole(vocab_size))
        self.embedding_changes = adapters.places(embedding, weight, device)
        own = ShardRange(self._vocabulary.start, rows, vocab_size)
        weight = weight if self.tied else "lm_head.weight"
        self.head_changes = adapters.places(Projection("lm_head", own, hidden), weight, device)

    def named_parameters(self) -> dict[str, ParameterShard | Tensor]:
        """Return the tensors to fill, by checkpoint name, without those of the predicting layer."""
        parameters: dict[str, ParameterShard | Tensor] = {
            f"{self._embedding_name}.weight": self.embedding,
            f"{self._last_norm}.weight": self.norm.weight,
        }
        own = self._vocabulary
        if not self.tied and own.length:
            shape = (own.total, self.embedding.shape[1])
            parameters["lm_head.weight"] = ParameterShard(self.head.weight[: own.length], shape, (own.start, 0))
        for layer in self.layers:
            parameters |= layer.named_parameters()
        return parameters

    @property
    def _parts(self) -> list[LayerWeights | PredictionWeights]:
        return [*self.layers, *(() if self.prediction is None else (self.prediction,))]

    @property
    def layer_shapes(self) -> tuple[LayerShape, ...]:
        """The attention of each layer that has it, on this rank."""
        return tuple(layer.attention.shape for layer in self.all_layers if layer.attention is not None)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of a sequence on this rank; 0 without layers that have any."""
        return sum(layer.states.state_bytes for layer in self.layers if layer.states is not None)

    def process_weights_after_loading(self) -> None:
        """Prepare the loaded weights for use. A tied LM head that needs another dtype than the embedding becomes a copy."""
        self.norm.process_weights_after_loading()
        for each in self._parts:
            each.process_weights_after_loading()
        # The weights of experts count as rounded, so the precision of a model that has any does not change.
        self.convert()
        if self.adapters is not None:
            self.adapters.load()

    def pack(self) -> None:
        for each in self._parts:
            each.pack()
        self.head.pack()
