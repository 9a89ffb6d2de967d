"""Divides a model of transformers over the ranks of a group, by the tensor-parallel plan of its config.

A plan has a style for modules and parameters: `colwise` divides the outputs of a product, `rowwise` its inputs, and so on. A
rank keeps its part of each weight. Hooks of the modules add the collectives.
The vocabulary of the LM head is divided always, as the plan of its class says for almost all models.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Module, Parameter, functional

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.models.huggingface.library import LibraryConfig, LibraryModel, base_of
from text_generation_shard.engines.torch.parallel.group import ParallelGroup
from text_generation_shard.engines.torch.parallel.tensor_parallel import ShardRange, TensorParallelRank

OUTPUTS, INPUTS = -2, -1
"""Dimensions of a weight [… experts, outputs, inputs] as transformers' plans count them."""


@dataclass(frozen=True, slots=True)
class Style:
    """The division of a parameter or of the weights of a linear layer, and the collectives of a module."""

    divided: int | None = None
    """The divided dimension of weights; None: each rank has the whole."""
    halves: bool = False
    """True: the dimension has two halves, gate and up, that are divided each."""
    takes_part: bool = False
    """True: a rank computes with its part of the module's input."""
    sums: bool = False
    """True: the outputs of all ranks are added."""
    gathers: bool = False
    """True: the outputs of all ranks are concatenated."""
    shares: bool = False
    """True: the input is divided by the number of ranks, because a module around it adds the outputs."""


STYLES = {
    "colwise": Style(OUTPUTS),
    "colwise_gather_output": Style(OUTPUTS, gathers=True),
    "packed_colwise": Style(OUTPUTS, halves=True),
    "rowwise": Style(INPUTS, sums=True),
    "rowwise_split_input": Style(INPUTS, takes_part=True, sums=True),
    "packed_rowwise": Style(INPUTS, halves=True),
    "moe_tp_experts": Style(sums=True),
    "all_reduce": Style(sums=True),
    "moe_identity_expert": Style(shares=True),
    **dict.fromkeys(("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local", "local_params"), Style()),
    **dict.fromkeys(("embedding_rowwise", "embedding_colwise"), Style()),
}
"""The styles of transformers 5.23. Embeddings are whole on every rank."""
EXPERTS = "moe_tp_experts"
HEADS = ("q_proj", "k_proj", "v_proj")
KV_HEADS = HEADS[1:]
"""Names of layers whose outputs are heads."""


class Division:
    """The division of a model for a rank of `group`. On the meta device, nothing but the plan and the shapes is checked."""

    def __init__(self, model: LibraryModel, group: ParallelGroup, device: torch.device) -> None:
        self._model = model
        self._name = type(model).__name__
        self._group, self._tp, self._device = group, group.tp, device
        self._config: LibraryConfig = base_of(model).config
        self._plan: Mapping[str, str] = getattr(self._config, "base_model_tp_plan", None) or {}

    def divide(self) -> None:
        """Keep this rank's part of the model, on its device. Raises EngineError with a one-line message."""
        if not self._plan:
            raise self._error("its config in transformers has no plan for it")
        self._even(self._config.num_attention_heads, "attention heads")
        base = base_of(self._model)
        modules = dict(base.named_modules())
        for name, module in modules.items():
            style = self._style(name)
            if style is not None and isinstance(module, Linear):
                self._divide_linear(name, module, style, modules[name.rpartition(".")[0]])
            for parameter in [each for each, _ in module.named_parameters(recurse=False)]:
                if (own := self._style(f"{name}.{parameter}")) is not None:
                    self._divide_parameter(module, parameter, own, name)
            if style is not None:
                self._check_divided(name, module, style)
                self._add_collectives(module, style)
        head = self._model.get_output_embeddings()
        if isinstance(head, Linear):
            self._divide_head(head)

    def _style(self, name: str) -> Style | None:
        """Return the style of a module or parameter of the base model, if the plan names it."""
        key = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
        if (given := self._plan.get(key)) is None:
            return None
        if given not in STYLES:
            raise self._error(f"its plan has the style {given} for {key}")
        return STYLES[given]

    def _divide_linear(self, name: str, linear: Linear, style: Style, parent: Module) -> None:
        if style.divided is None:
            return
        if style.divided == INPUTS:
            self._divide_parameter(linear, "weight", style, name)
            if linear.bias is not None and self._tp.rank > 0:
                # The outputs are added: one rank has the bias.
                self._set(linear, "bias", torch.zeros_like(linear.bias))
        else:
            is_whole = style.halves or style.gathers
            part = None if is_whole else self._part_of_heads(name, linear.out_features, parent)
            self._divide_parameter(linear, "weight", style, name, part)
            if linear.bias is not None:
                self._divide_parameter(linear, "bias", style, name, part)
        linear.out_features, linear.in_features = linear.weight.shape

    def _part_of_heads(self, name: str, total: int, parent: Any) -> ShardRange:  # noqa: ANN401 – a module of the library
        """Return this rank's outputs of a layer: whole heads; ranks share KV heads if there are more ranks than heads."""
        head_dim, layer = getattr(parent, "head_dim", None), name.rpartition(".")[2]
        if layer not in HEADS or not isinstance(head_dim, int) or total % head_dim:
            return self._even(total, f"outputs of {name}")
        heads = total // head_dim
        if layer not in KV_HEADS or self._tp.world_size <= heads:
            part = self._even(heads, f"heads of {name}")
        else:
            part = self._tp.kv_heads(heads)
            parent.num_key_value_groups = self._config.num_attention_heads // self._tp.world_size
        return ShardRange(part.start * head_dim, part.length * head_dim, total)

    def _divide_parameter(
        self, module: Module, name: str, style: Style, unit: str, part: ShardRange | None = None
    ) -> None:
        """Replace a parameter by this rank's part of it: an equal part, or the given one. `unit` names it for errors."""
        if style.divided is None:
            return
        whole: Tensor = getattr(module, name)
        dim = style.divided if whole.ndim > 1 else -1
        halves = whole.chunk(2, dim) if style.halves else (whole,)
        part = part or self._even(
            halves[0].shape[dim], f"{'outputs' if style.divided == OUTPUTS else 'inputs'} of {unit}"
        )
        self._set(module, name, torch.cat([half.narrow(dim, part.start, part.length) for half in halves], dim))

    def _check_divided(self, name: str, module: Module, style: Style) -> None:
        """Raise EngineError if the plan leaves a module as it is that it means to divide."""
        if style is STYLES[EXPERTS]:
            for parameter, _ in module.named_parameters(recurse=False):
                if self._style(f"{name}.{parameter}") is None:
                    raise self._error(f"its plan has no style for {name}.{parameter}")
        elif style.divided is not None and not isinstance(module, Linear | Embedding):
            raise self._error(f"its plan divides {name}, which is a {type(module).__name__}")

    def _add_collectives(self, module: Module, style: Style) -> None:
        if isinstance(module, Embedding):
            return
        tp, group = self._tp, self._group
        if style.takes_part:
            module.register_forward_pre_hook(_input_changed(lambda x: _part_of(x, tp)))
        if style.shares:
            module.register_forward_pre_hook(_input_changed(lambda x: x / tp.world_size))
        if style.sums:
            module.register_forward_hook(_output_changed(lambda y: _sum(y, group)))
        if style.gathers:
            module.register_forward_hook(_output_changed(lambda y: _gather(y, group)))

    def _divide_head(self, head: Linear) -> None:
        """Divide the vocabulary; `out_features` remains that of the whole."""
        vocabulary, group = head.out_features, self._group
        part, width = self._tp.padded(vocabulary), -(-vocabulary // self._tp.world_size)
        for name, whole in list(head.named_parameters(recurse=False)):
            own = whole.narrow(0, part.start, part.length)
            missing = width - part.length
            # The embedding may be the same parameter.
            self._set(head, name, functional.pad(own, (0, 0, 0, missing) if whole.ndim > 1 else (0, missing)))
        head.register_forward_hook(_output_changed(lambda y: _gather(y, group)[..., :vocabulary]))

    def _set(self, module: Module, name: str, values: Tensor) -> None:
        """Make `values` a parameter with memory of its own."""
        with torch.no_grad():
            own = torch.empty_like(values, device=self._device, memory_format=torch.contiguous_format)
            own.copy_(values)
        setattr(module, name, Parameter(own, requires_grad=False))

    def _even(self, total: int, unit: str) -> ShardRange:
        try:
            return self._tp.even(total, unit)
        except EngineError as error:
            raise self._error(str(error)) from None

    def _error(self, reason: str) -> EngineError:
        return EngineError(f"{self._name} is not divided by --num-shard: {reason} (--num-replicas runs whole copies)")


def _input_changed(change: Callable[[Tensor], Tensor]) -> Callable[[Module, tuple[Any, ...]], tuple[Any, ...]]:
    return lambda module, inputs: (change(inputs[0]), *inputs[1:])


def _output_changed(change: Callable[[Tensor], Tensor]) -> Callable[[Module, Any, Any], Any]:
    def hook(module: Module, inputs: Any, output: Any) -> Any:  # noqa: ANN401 – a module's output
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    return hook


def _part_of(x: Tensor, tp: TensorParallelRank) -> Tensor:
    part = tp.even(x.shape[-1], "inputs")
    return x.narrow(-1, part.start, part.length)


def _sum(output: Tensor, group: ParallelGroup) -> Tensor:
    output = output.contiguous()
    group.all_reduce(output.view(-1, output.shape[-1]))
    return output


def _gather(output: Tensor, group: ParallelGroup) -> Tensor:
    rows = output.reshape(-1, output.shape[-1]).contiguous()
    whole = rows.new_empty(len(rows), group.tp.world_size * rows.shape[1])
    group.all_gather_last_dim(rows, whole)
    return whole.view(*output.shape[:-1], whole.shape[1])
