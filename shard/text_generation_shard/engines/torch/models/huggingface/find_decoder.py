"""Finds the native decoder that computes the same as a model of transformers, if all its layers have the usual form.

A usual layer adds the attention of its normed input to the input, and then does the same with an MLP; both outputs may be
normed. That our layer computes the same is proved for each layer in float32, with random input at positions near and far. So a
family that only transformers knows gets the kernels and the graphs of the native ones. An MLP of another form, such as a
mixture of experts, stays the library's. The names of modules only say where to look.
"""

import copy
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, ModuleList

from text_generation_common.log import log
from text_generation_shard.engines.torch.batch.kv_cache import LayerShape
from text_generation_shard.engines.torch.layers.linear import DenseLinear, float32_product
from text_generation_shard.engines.torch.layers.mlp import GatedMLP
from text_generation_shard.engines.torch.layers.norm import HeadNorms
from text_generation_shard.engines.torch.layers.ops import Ops
from text_generation_shard.engines.torch.layers.precision import Precision
from text_generation_shard.engines.torch.layers.rope import RotaryEmbedding
from text_generation_shard.engines.torch.models.huggingface.attention import AttentionCall, StepAttention, handled_by
from text_generation_shard.engines.torch.models.huggingface.library import LibraryModule
from text_generation_shard.engines.torch.models.huggingface.model import LibraryMLP, TransformersModel
from text_generation_shard.engines.torch.models.huggingface.probe import (
    LayerInput,
    LoneTokens,
    Rotation,
    UnusualError,
    activation_of,
    is_same,
    layer_rotations,
    norm_of,
    random_like,
    run_without_layers,
)
from text_generation_shard.engines.torch.models.native.decoder import (
    AttentionPart,
    Decoder,
    DecoderLayer,
    DecoderWeights,
)
from text_generation_shard.engines.torch.models.native.model_config import DecoderNumbers
from text_generation_shard.engines.torch.parallel.group import ParallelGroup

QKV_NAMES = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",), ("query_key_value",))
OUTPUT_NAMES = (("o_proj",), ("out_proj",), ("dense",))
HEAD_NORM_NAMES = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("query_layernorm", "key_layernorm"))
GATE_UP_NAMES = (("gate_proj", "up_proj"), ("gate_up_proj",))
DOWN_NAMES = (("down_proj",),)
USUAL = re.compile("nx(n?)nx(n?)")
"""The parts of a usual layer in order: norms (n), attention and MLP (x)."""
PROBE_PLACES = (0.0, 0.001, 0.1, 0.5, 1.0)
"""Positions of the random tokens, as parts of the last one."""
PROBE_SIZE = 0.02
"""Size of the random input: so small that the eps of norms counts."""
MOST_LAYER_DIFFERENCE = 1e-4
"""Largest relative error between the outputs of two layers in float32."""


@torch.inference_mode()
def find_decoder(
    model: TransformersModel, max_sequence_length: int, group: ParallelGroup, precision: Precision
) -> Callable[[Ops], Decoder] | None:
    """Return a function of the decoder that computes the same as `model`, which has been recorded; None if there is none.

    All ranks of `group` search at the same time, each with its part of the weights, and find the same.
    """
    try:
        return _Finder(model, max_sequence_length, group, precision).find()
    except UnusualError as error:
        reason = str(error)
    except (torch.OutOfMemoryError, MemoryError):
        raise  # on this rank alone: the others would wait for it
    except Exception as error:  # noqa: BLE001 – the code of a model may not take such inputs, and fail in many ways
        reason = f"{type(error).__name__} in a probe"
    log.info("the layers run in transformers", reason=reason)
    return None


class _Finder:
    def __init__(
        self, model: TransformersModel, max_sequence_length: int, group: ParallelGroup, precision: Precision
    ) -> None:
        self._model = model
        self._precision = precision
        self._group = group
        self._config: Any = model.base.config
        self._max_sequence_length = max_sequence_length
        self._embedding: Tensor = model.library.get_input_embeddings().weight
        last = max_sequence_length - 1
        self._positions = torch.tensor([int(place * last) for place in PROBE_PLACES], device=self._embedding.device)
        self._head_dim = _only({each.head_dim for each in model.layers}, "head sizes")
        self._scale, self._softcap = _only(set(model.rules), "scales of attention")
        self._residual_scale = float(getattr(self._config, "residual_multiplier", 1.0))

    def find(self) -> Callable[[Ops], Decoder]:
        base, modules = self._model.base, self._layer_modules()
        ids = torch.arange(3, 3 + len(self._positions), device=self._embedding.device) % len(self._embedding)
        run = run_without_layers(base, modules, self._positions, input_ids=ids.unsqueeze(0))
        hidden = run.inputs[0].hidden
        embedding_scale = _ratio(hidden[0], self._embedding[ids])
        norm = norm_of(run.last_norm)
        if norm is None or not is_same(run.last_norm(hidden), run.output):
            raise UnusualError("the last norm is another")
        layers, rotary = self._layers(modules)
        norms = [(each.input_norm, each.after_attention, each.mlp_norm, each.after_mlp) for each in layers]
        if len({each.eps for some in norms for each in some if each is not None} | {norm.eps}) > 1:
            raise UnusualError("norms have several eps")
        head, divisor, final_softcap = self._head()
        weights = DecoderWeights(
            embedding=self._embedding,
            layers=layers,
            rotary=rotary,
            norm=norm,
            head=head,
            precision=self._precision,
        )
        if not any(isinstance(layer.mlp, LibraryMLP) for layer in layers):
            weights.convert()
        return partial(Decoder, self._numbers(embedding_scale, divisor, final_softcap), weights, group=self._group)

    def _numbers(self, embedding_scale: float, divisor: float, final_softcap: float | None) -> DecoderNumbers:
        vocab_size, hidden_size = self._embedding.shape
        return DecoderNumbers(
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            max_sequence_length=self._max_sequence_length,
            attention_scale=self._scale,
            attention_softcap=self._softcap,
            embedding_scale=embedding_scale,
            residual_scale=self._residual_scale,
            logits_divisor=divisor,
            final_softcap=final_softcap,
        )

    def _layer_modules(self) -> Sequence[Any]:
        calls = self._model.calls
        if calls != [AttentionCall(index, is_first=True) for index in range(len(calls))]:
            raise UnusualError("layers share keys and values")
        lists = [each for each in self._model.base.children() if isinstance(each, ModuleList)]
        return list(_only([each for each in lists if len(each) == len(calls)], "lists of layers"))

    def _layers(self, modules: Sequence[Any]) -> tuple[list[DecoderLayer], list[RotaryEmbedding]]:
        base, head_dim = self._model.base, self._head_dim
        probe = PROBE_SIZE * random_like(self._embedding.float(), 1, len(self._positions), self._embedding.shape[1])
        inputs = run_without_layers(base, modules, self._positions, inputs_embeds=probe).inputs
        rotations = layer_rotations(base, modules, head_dim, self._max_sequence_length, self._embedding)
        layers: list[DecoderLayer] = []
        rotary: list[RotaryEmbedding] = []
        for index, (module, given) in enumerate(zip(modules, inputs, strict=True)):
            wide = _with_random_norms(copy.deepcopy(module).float())
            names, expected = self._run_library(wide, given, probe, self._model.layers[index])
            for rotation in rotations[index]:
                layer = self._layer(wide, names, rotation, self._model.layers[index])
                result = self._run_own(layer, rotation, probe[0], self._model.layers[index])
                if self._group.agreed(float(_is_close(result, expected, probe[0])), probe.device):
                    break
            else:
                raise UnusualError(f"layer {index} has another form")
            layers.append(self._layer(module, names, rotation, self._model.layers[index]))
            rotary.append(rotation.rotary)
        return layers, rotary

    def _run_library(
        self, layer: LibraryModule, given: LayerInput, probe: Tensor, shape: LayerShape
    ) -> tuple[list[str], Tensor]:
        """Return the names of the parts of a layer in the order of their calls, and its output [tokens, hidden]."""
        called: list[str] = []
        hooks = [
            child.register_forward_hook(lambda *_, name=name: called.append(name))
            for name, child in layer.named_children()
            if any(True for _ in child.parameters())
        ]
        step = LoneTokens(self._positions, shape)
        with handled_by(StepAttention(step, [AttentionCall(0, is_first=True)], [shape])):
            output = layer(probe, *given.arguments, **given.named)
        for hook in hooks:
            hook.remove()
        return called, (output[0] if isinstance(output, tuple) else output)[0]

    def _run_own(self, layer: DecoderLayer, rotation: Rotation, probe: Tensor, shape: LayerShape) -> Tensor:
        """Return the output of our layer for the same input."""
        assert layer.input_norm is not None
        weights = DecoderWeights(
            embedding=probe,
            layers=[layer],
            rotary=[rotation.rotary],
            norm=layer.input_norm,  # any norm: only the residual stream is read
            head=DenseLinear(probe, None, torch.float32),
            precision=Precision.uniform(torch.float32),
        )
        decoder = Decoder(self._numbers(1.0, 1.0, None), weights, Ops(self._group), self._group)
        step = LoneTokens(self._positions, shape)
        decoder.forward(step)
        return step.residual

    def _layer(self, module: LibraryModule, names: list[str], rotation: Rotation, shape: LayerShape) -> DecoderLayer:
        parts = [getattr(module, name) for name in names]
        norms = [norm_of(part) for part in parts]
        match = USUAL.fullmatch("".join("x" if norm is None else "n" for norm in norms))
        if match is None:
            raise UnusualError("parts of a layer come in another order")
        (attention, mlp) = (part for part, norm in zip(parts, norms, strict=True) if norm is None)
        found = iter(norm for norm in norms if norm is not None)
        input_norm = next(found)
        after_attention = next(found) if match[1] else None
        mlp_norm = next(found)
        after_mlp = next(found) if match[2] else None
        own_mlp = self._mlp(mlp)
        if isinstance(own_mlp, LibraryMLP) and self._group.tp.world_size > 1:
            raise UnusualError("an MLP of another form is divided")  # it sums its output over the ranks itself
        sinks = getattr(attention, "sinks", None)
        qkv = self._qkv(attention, rotation.order, shape)
        return DecoderLayer(
            attention=AttentionPart(
                shape=shape,
                qkv=qkv,
                qkv_width=len(qkv.weight),
                output=self._linear(_linears(attention, OUTPUT_NAMES)),
                head_norms=self._head_norms(attention, rotation.order, shape),
                sinks=None if sinks is None else sinks.data,
            ),
            input_norm=input_norm,
            after_attention=after_attention,
            mlp_norm=mlp_norm,
            mlp=own_mlp,
            after_mlp=after_mlp,
        )

    def _qkv(self, attention: LibraryModule, order: list[int] | None, shape: LayerShape) -> DenseLinear:
        num_heads, num_kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        linears = _linears(attention, QKV_NAMES)
        if sum(each.out_features for each in linears) != (num_heads + 2 * num_kv_heads) * head_dim:
            raise UnusualError("attention has other projections")
        if order is None:
            return self._linear(linears)
        # The rows come in another order, so the library's own weights stay as well.
        rotated = num_heads + num_kv_heads
        rows = torch.arange((num_heads + 2 * num_kv_heads) * head_dim, device=self._embedding.device)
        rows.view(-1, head_dim)[:rotated] = rows.view(-1, head_dim)[:rotated, order]
        weight, bias = _fused(linears)
        return self._product(weight[rows], None if bias is None else bias[rows])

    def _mlp(self, module: LibraryModule) -> LibraryMLP | GatedMLP:
        kind = activation_of(module)
        if kind is None:
            return LibraryMLP(module)
        gate_up = self._linear(_linears(module, GATE_UP_NAMES))
        return GatedMLP(gate_up, self._linear(_linears(module, DOWN_NAMES)), kind)

    def _linear(self, linears: Sequence[Any]) -> DenseLinear:
        """Return several linear layers with one input as one, whose rows take the place of their own weights."""
        weight, bias = _fused(linears)
        if len(linears) > 1:
            rows = torch.split(weight, [each.out_features for each in linears])
            for linear, own in zip(linears, rows, strict=True):
                linear.weight.data = own
        return self._product(weight, bias)

    def _product(self, weight: Tensor, bias: Tensor | None) -> DenseLinear:
        return DenseLinear(weight, bias, torch.promote_types(weight.dtype, self._precision.products))

    def _head_norms(self, attention: LibraryModule, order: list[int] | None, shape: LayerShape) -> HeadNorms | None:
        for names in HEAD_NORM_NAMES:
            if all(hasattr(attention, name) for name in names):
                query, key = (norm_of(getattr(attention, name)) for name in names)
                if query is None or key is None or query.eps != key.eps or len(query.weight) != self._head_dim:
                    raise UnusualError("queries and keys have other norms")
                norms = HeadNorms(query, key)
                norms.fill_rows(shape.num_heads, shape.num_kv_heads, order)
                return norms
        return None

    def _head(self) -> tuple[DenseLinear, float, float | None]:
        """Return the LM head, the divisor of logits and their softcap."""
        module = self._model.library.get_output_embeddings()
        weight: Tensor = module.weight
        hidden = random_like(weight, 4, weight.shape[1])
        expected = self._model.logits(hidden)
        head = DenseLinear(weight, None, self._precision.logits)
        softcap = getattr(self._config, "final_logit_softcapping", None)
        own = float32_product(hidden, weight, None)
        logits = own.new_empty(len(own), self._group.tp.world_size * own.shape[1])
        self._group.all_gather_last_dim(own, logits)
        logits = logits[:, : len(self._embedding)]
        for divisor in (
            1.0,
            getattr(self._config, "logits_scaling", 1.0),
            1 / getattr(self._config, "logit_scale", 1.0),
        ):
            capped = logits / divisor
            if softcap is not None:
                capped = (capped / softcap).tanh() * softcap
            if weight.dtype != torch.float32:
                # The library rounds its logits.
                capped, expected = capped.to(weight.dtype), expected.to(weight.dtype)
            if module.bias is None and is_same(capped, expected):
                return head, float(divisor), softcap
        raise UnusualError("logits are computed in another way")


def _only(found: Any, name: str) -> Any:  # noqa: ANN401 – any element
    """Return the single element of a collection."""
    if len(found) != 1:
        raise UnusualError(f"{len(found)} different {name}")
    return next(iter(found))


def _ratio(hidden: Tensor, rows: Tensor) -> float:
    """Return the factor between the rows of the embedding and hidden states."""
    hidden, rows = hidden.float(), rows.float()
    ratio = float((hidden * rows).sum() / rows.square().sum())
    if (hidden - ratio * rows).norm() > 1e-2 * hidden.norm():
        raise UnusualError("the first layer gets more than the embedding")
    return ratio


def _is_close(result: Tensor, expected: Tensor, probe: Tensor) -> bool:
    """Return True if two layers add the same to their input."""
    return bool((result - expected).norm() <= MOST_LAYER_DIFFERENCE * (expected - probe).norm())


def _with_random_norms(layer: LibraryModule) -> LibraryModule:
    """Change the vectors of a layer, some of which have values that hide a difference, as ones in norms."""
    for index, parameter in enumerate(layer.parameters()):
        if parameter.ndim == 1:
            parameter.data += 0.1 * (1 + index % 3) * random_like(parameter, len(parameter))
    return layer


def _linears(module: LibraryModule, choices: Sequence[tuple[str, ...]]) -> list[Any]:
    for names in choices:
        linears = [getattr(module, name, None) for name in names]
        if all(type(linear) is Linear for linear in linears):
            return linears
    raise UnusualError(f"{type(module).__name__} has no {choices[0][0]}")


def _fused(linears: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    if len(linears) == 1:
        bias = linears[0].bias
        return linears[0].weight.data, None if bias is None else bias.data
    weight = torch.cat([linear.weight for linear in linears])
    if all(linear.bias is None for linear in linears):
        return weight, None
    biases = [weight.new_zeros(each.out_features) if each.bias is None else each.bias for each in linears]
    return weight, torch.cat(biases)
