"""The mixture of experts of a layer: its weights, or one rank's part of them, and its forward pass."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from text_generation_shard.engines.torch.kernels.operands import GatedActivation, Routing
from text_generation_shard.engines.torch.layers.expert_linear import ExpertLinear, Routed
from text_generation_shard.engines.torch.layers.linear import DenseLinear, Projection
from text_generation_shard.engines.torch.layers.mlp import DenseMLP
from text_generation_shard.engines.torch.layers.norm import RMSNorm
from text_generation_shard.engines.torch.layers.ops import Ops, ResidualStream
from text_generation_shard.engines.torch.layers.quantized.choice import quantized_experts
from text_generation_shard.engines.torch.models.native.model_config import ModelConfig
from text_generation_shard.engines.torch.parallel.tensor_parallel import ShardRange, TensorParallelRank
from text_generation_shard.engines.torch.weights.parameter import OtherSource, ParameterShard

ROUTER_ROWS = 8
"""The rows of a router's weight are a multiple of this."""


def shares_form(model: ModelConfig, layer: str) -> bool:
    """Return True if the expert shared by all tokens has the size and the format of the others: it is then one more of them."""
    config = model.experts
    assert config is not None
    if not config.family.shared_gate or config.shared_inner != config.inner:
        return False
    if (scheme := model.quantization) is None:
        return True
    modules = f"{config.family.module}.experts.0", config.family.shared_module
    own, shared = ({scheme.format_of(f"{layer}{module}.{name}") for name in config.family.names} for module in modules)
    return own == shared


class Experts:
    """A router, experts, and possibly an expert shared by all tokens. Each rank has some inner values of every expert.

    A shared expert with the form of the others is the last of them, and its gate the last row of the router.
    """

    def __init__(
        self,
        model: ModelConfig,
        layer: str,
        tp: TensorParallelRank,
        device: torch.device,
        dtype: torch.dtype,
        shared: DenseMLP | None,
    ) -> None:
        config, hidden = model.experts, model.hidden_size
        assert config is not None
        self._config = config
        biased = config.family.clamped
        self._activation = GatedActivation(config.activation, config.family.clamped, config.alpha, config.limit)
        module = config.family.module
        self._prefix = f"{layer}{module}." if module else layer
        self._fused = f"{layer}{config.family.fused_module}." if module else layer
        self._inner = tp.even(config.inner, "inner values of an expert")
        self._shared = shared
        merged = shared is None and config.shared_inner > 0
        self._names = [f"{self._prefix}experts.{expert}." for expert in range(config.count)]
        self._names += [f"{layer}{config.family.shared_module}."] if merged else []
        count = len(self._names)

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype)

        # Rounded logits would choose other experts: they are float32 in any precision. Those of the last rows are not used: cuBLAS
        # has a slow kernel for odd numbers of them.
        rows = -(-count // ROUTER_ROWS) * ROUTER_ROWS
        self._router = DenseLinear(empty(rows, hidden), None, torch.float32)
        has_gate = shared is not None and config.family.shared_gate
        self._shared_gate = DenseLinear(empty(1, hidden), None, torch.float32) if has_gate else None
        # The choice adds it to the logits: after the product it would be a kernel of its own.
        bias = empty(config.count) if biased else None
        choice_bias = torch.zeros(config.count, device=device) if config.family.sigmoid else None
        scale = torch.full((config.count,), config.scale, device=device) if config.scale != 1.0 else None
        eps = config.family.eps if config.family.sigmoid else 0.0
        # gpt-oss softmaxes the chosen logits, which is the same as normalizing the probabilities.
        self._routing = Routing(
            config.each,
            config.normalize,
            scale,
            choice_bias,
            eps,
            config.groups,
            config.family.group_best,
            merged,
            bias,
        )
        parts = 1 + self._activation.has_gate
        gate_up, down = (parts * self._inner.length, hidden), (hidden, self._inner.length)
        kept_bytes = model.kept_bytes(dtype.itemsize)
        packed = quantized_experts(self._projections(hidden), model.quantization, device, dtype, kept_bytes)
        self._packed = packed or ()
        products = self._packed or (None, None)
        weights = [empty(count, *((shape[0], 0) if self._packed else shape)) for shape in (gate_up, down)]
        gate_up_bias = empty(count, gate_up[0]) if biased else None
        # The outputs of the ranks are summed, so only one rank adds the bias.
        down_bias = empty(count, hidden) if biased and tp.rank == 0 else None
        self._gate_up = ExpertLinear(weights[0], gate_up_bias, products[0])
        self._down = ExpertLinear(weights[1], down_bias, products[1])

    def _projections(self, hidden: int) -> list[list[list[Projection]]]:
        """Return the projections of each expert, in the order of their rows: of gate and up, and of down."""
        whole, family = ShardRange.whole(hidden), self._config.family
        if family.clamped:
            rows = _doubled(self._inner)
            gate_up = [[Projection(f"{name}gate_up_proj", rows, whole)] for name in self._names]
        else:
            inner = family.names[not self._activation.has_gate : 2]
            gate_up = [[Projection(name + each, self._inner, whole) for each in inner] for name in self._names]
        down = "down_proj" if family.clamped else family.names[2]
        return [gate_up, [[Projection(name + down, whole, self._inner)] for name in self._names]]

    def add(self, ops: Ops, stream: ResidualStream, before: RMSNorm | None, after: RMSNorm | None) -> None:
        if before is not None and self._shared is None and after is None:
            experts = self._gate_up, self._down, self._activation
            if ops.add_few_experts(stream, before, self._router, experts, self._routing):
                return
        x = ops.norm(stream, before)
        out = self.outputs(ops, x, self.route(ops, x))
        if self._shared is not None:
            shared = self._shared.down(self._activation(self._shared.gate_up(x)))
            out += shared if self._shared_gate is None else shared * self._shared_gate(x).sigmoid().to(out.dtype)
        ops.add(stream, out, after)

    @property
    def router_weight(self) -> Tensor:
        """[experts, hidden], without a row of the expert that all tokens share."""
        return self._router.weight[: self._config.count]

    def route(self, ops: Ops, x: Tensor, expert_scale: Tensor | None = None) -> Routed:
        """Return the experts of each token: see `choose_top_k`."""
        routing = self._routing if expert_scale is None else replace(self._routing, scale=expert_scale)
        return ops.route(self._router(x)[:, : len(self._gate_up.weight)], routing)

    def outputs(self, ops: Ops, x: Tensor, routed: Routed) -> Tensor:
        """Return the weighted outputs of the chosen experts, without the other ranks' parts."""
        return ops.experts(x, *routed, self._gate_up, self._down, self._activation)

    def named_parameters(self) -> dict[str, ParameterShard | Tensor]:
        """Return the tensors to fill. Those of an expert may be in a tensor of all experts instead: see OtherSource."""
        family, prefix = self._config.family, self._prefix
        router = self.router_weight
        parameters: dict[str, ParameterShard | Tensor] = {f"{prefix}{family.router}.weight": router}
        if self._routing.bias is not None:
            parameters[f"{prefix}{family.router}.bias"] = self._routing.bias
        if self._routing.choice_bias is not None and self._config.chosen_by_bias:
            parameters[f"{prefix}{family.choice_bias}"] = self._routing.choice_bias
        if self._shared is not None:
            parameters |= self._shared.named_parameters()
        if self._shared_gate is not None:
            parameters[f"{prefix}shared_expert_gate.weight"] = self._shared_gate.weight
        if self._routing.has_shared:
            parameters[f"{prefix}shared_expert_gate.weight"] = self._router.weight[
                self._config.count : self._config.count + 1
            ]
        if self._prefix != self._fused:
            other = OtherSource(f"{self._fused}{family.router}.weight", tuple(router.shape))
            parameters[f"{prefix}{family.router}.weight"] = replace(ParameterShard.whole(router), other=other)
        for each in self._packed:
            parameters |= each.named_parameters()
        for expert, name in enumerate(() if self._packed else self._names):
            parameters |= self._of_expert(expert, name)
        return parameters | self._biases()

    def process_weights_after_loading(self) -> None:
        for each in self._packed:
            each.process_weights_after_loading()
        if self._shared is not None:
            self._shared.process_weights_after_loading()

    def pack(self) -> None:
        self._gate_up.pack()
        self._down.pack()
        if self._shared is not None:
            self._shared.pack()

    def _of_expert(self, expert: int, prefix: str) -> dict[str, ParameterShard]:
        """Return the weights of an expert: gate, up and down, or those of gpt-oss, which has one for interleaved gate and up.

        A checkpoint may have them in `gate_up_proj` and `down_proj` of all experts: those of gpt-oss and Qwen3-VL are transposed.
        The shared expert is not among them.
        """
        config, inner = self._config, self._inner
        gate_up, down = self._gate_up.weight[expert], self._down.weight[expert]
        hidden, transposed = gate_up.shape[1], config.family.clamped or config.transposed
        fused_gate_up, fused_down = config.family.fused_names

        def source(name: str, outputs: int, inputs: int, first_row: int = 0) -> OtherSource | None:
            if expert == config.count:
                return None
            sizes = (inputs, outputs) if transposed else (outputs, inputs)
            return OtherSource(
                f"{self._fused}{name}", (config.count, *sizes), expert, transposed=transposed, first_row=first_row
            )

        down_part = ParameterShard(
            down, (hidden, inner.total), (0, inner.start), other=source(fused_down, hidden, inner.total)
        )
        if config.family.clamped:
            rows = _doubled(inner)
            other = source(fused_gate_up, rows.total, hidden)
            whole = ParameterShard(gate_up, (rows.total, hidden), (rows.start, 0), other=other)
            return {f"{prefix}gate_up_proj": whole, f"{prefix}down_proj": down_part}
        count = 1 + self._activation.has_gate
        parts = [
            ParameterShard(
                part,
                (inner.total, hidden),
                (inner.start, 0),
                other=source(fused_gate_up, count * inner.total, hidden, index * inner.total),
            )
            for index, part in enumerate(gate_up.chunk(count))
        ]
        names = (f"{prefix}{name}.weight" for name in config.family.names[2 - count :])
        return dict(zip(names, (*parts, down_part), strict=True))

    def _biases(self) -> dict[str, ParameterShard | Tensor]:
        biases: dict[str, ParameterShard | Tensor] = {}
        if (bias := self._gate_up.bias) is not None:
            rows = _doubled(self._inner)
            biases[f"{self._prefix}experts.gate_up_proj_bias"] = ParameterShard(
                bias, (self._config.count, rows.total), (0, rows.start)
            )
        if self._down.bias is not None:
            biases[f"{self._prefix}experts.down_proj_bias"] = self._down.bias
        return biases


class ExpertsBesideMLP:
    """Experts and a dense MLP, whose outputs are normed and added (Gemma 4)."""

    def __init__(
        self, experts: Experts, dense: DenseMLP, layer: str, norm: Callable[[int, float], RMSNorm], hidden: int
    ) -> None:
        self._experts, self._dense = experts, dense
        self._router_norm = norm(hidden, hidden**-0.5)
        self._expert_norm, self._after_dense, self._after_experts = (norm(hidden, 1.0) for _ in range(3))
        self._norms = {
            f"{layer}router.scale": self._router_norm,
            f"{layer}pre_feedforward_layernorm_2.weight": self._expert_norm,
            f"{layer}post_feedforward_layernorm_1.weight": self._after_dense,
            f"{layer}post_feedforward_layernorm_2.weight": self._after_experts,
        }
        self._scale_name = f"{layer}router.per_expert_scale"
        self._expert_scale = torch.empty_like(experts.router_weight[:, 0])

    def named_parameters(self) -> dict[str, ParameterShard | Tensor]:
        norms = {name: norm.weight for name, norm in self._norms.items()}
        own = {**norms, self._scale_name: self._expert_scale}
        return {**own, **self._dense.named_parameters(), **self._experts.named_parameters()}

    def process_weights_after_loading(self) -> None:
        for norm in self._norms.values():
            norm.process_weights_after_loading()
        self._dense.process_weights_after_loading()
        self._experts.process_weights_after_loading()

    def pack(self) -> None:
        self._dense.pack()
        self._experts.pack()

    def add(self, ops: Ops, stream: ResidualStream, before: RMSNorm | None, after: RMSNorm | None) -> None:
        assert after is not None
        dense = self._dense.down(self._dense.inner(ops, stream, before))
        routed = self._experts.route(ops, ops.norm(stream, self._router_norm), self._expert_scale)
        sparse = self._experts.outputs(ops, ops.norm(stream, self._expert_norm), routed)
        ops.add_sum(stream, (dense, sparse), (self._after_dense, self._after_experts), after)


def _doubled(inner: ShardRange) -> ShardRange:
    """Return the rows of interleaved gate and up."""
    return ShardRange(2 * inner.start, 2 * inner.length, 2 * inner.total)
