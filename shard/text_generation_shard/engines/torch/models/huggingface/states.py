"""Layers with a state: gated delta nets, state-space layers and short convolutions.

The state of a sequence depends on all its tokens, and cannot be read from the KV cache. Each such layer has pools of states: see
`StateLayer`. The layers of a flat batch are computed by the library's code: decode rows as one batch, which a CUDA graph can
capture, and chunks one by one. The states of a batch are copied from the pools to the library's cache object and back. A sequence
that starts at position 0 gets a new state.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Conv1d, Module

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.attention.step import Step
from text_generation_shard.engines.torch.models.huggingface.library import (
    LibraryConfig,
    LibraryModel,
    LibraryModule,
    base_of,
    new_cache,
)

CACHE_ARGUMENTS = ("cache_params", "past_key_values")
"""Names under which layers get the cache object. Attention layers have the second name too, but no convolution."""

LibraryCache: TypeAlias = Any
Output: TypeAlias = Tensor | tuple[Tensor, ...]
Place: TypeAlias = tuple[str, object]
"""An attribute of a layer of a library cache, and the key of a state in it; None if the attribute is the state."""
Blocks: TypeAlias = Tensor | slice
Call: TypeAlias = Callable[[LibraryCache], Any]
"""Computes a layer with the states of a cache, which it updates."""


class LibraryStates:
    """The layers of a model that have a state, and the states of sequences."""

    def __init__(self, model: LibraryModel) -> None:
        self._config: LibraryConfig = base_of(model).config
        self._used: LibraryCache = None
        """Scratch cache object of the library; the states of the current batch are swapped into it."""
        self._pools: dict[int, dict[Place, Tensor]] = {}
        """For each layer, its states: [blocks, …]."""
        self._recorded: LibraryCache = None
        self._new: dict[int, LibraryCache] = {}
        """The caches of the chunks that start in this step at position 0, by their first token."""
        self._step: Step | None = None
        """None: a pass for a single sequence without a past."""
        self.layers = state_layers(model)
        for layer in self.layers:
            layer.forward = self._by_sequence(layer.forward, _state_argument(layer), int(layer.layer_idx))

    @property
    def pools(self) -> list[Tensor]:
        """The states, [blocks, …] each."""
        return [state for pool in self._pools.values() for state in pool.values()]

    @property
    def block_bytes(self) -> int:
        return sum(state.shape[1:].numel() * state.itemsize for state in self.pools)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the shapes of the states in a pass. Raises EngineError if the library keeps them in an unknown form."""
        self._step = None
        if not self.layers:
            yield
            return
        self._recorded = new_cache(self._config)
        try:
            yield
            self._used = self._recorded
            indices = [int(layer.layer_idx) for layer in self.layers]
            self._pools = {index: _states(self._used.layers[index]) for index in indices}
            if not all(self._pools.values()):
                raise EngineError("its layers with a state keep none in their cache")
            self.allocate(0)
        finally:
            self._recorded = None

    def allocate(self, blocks: int) -> None:
        """Replace the pools by such of `blocks` blocks. Call `recorded` first."""
        for pool in self._pools.values():
            # The old ones are freed first: both need not fit at once.
            for place, state in pool.items():
                pool[place] = state.new_empty(0, *state.shape[1:])
                pool[place] = state.new_zeros(blocks, *state.shape[1:])

    def begin(self, step: Step | None) -> None:
        """Compute the following passes for the sequences of `step`; None: for a single sequence without a past."""
        self._step = step
        if step is not None and self.layers:
            self._new = {chunk.first: new_cache(self._config) for chunk in step.state_rows.parts if not chunk.start}

    def _by_sequence(self, forward: Callable[..., Any], argument: str, index: int) -> Callable[..., Any]:
        """Return `forward` for a flat batch of the sequences of the step."""

        parameters = list(inspect.signature(forward).parameters)

        def run(hidden_states: Tensor, *given: object, **named: object) -> Output:
            named |= dict(zip(parameters[1:], given, strict=False))
            if self._step is None:
                return _as_returned(_tensors(forward(hidden_states, **named | {argument: self._recorded})))

            def call(own: Tensor, cache: LibraryCache) -> Any:  # noqa: ANN401 – the output of a layer of the library
                return forward(own, **named | {argument: cache})

            rows = self._step.state_rows
            hidden = rows.in_plan_order(hidden_states[0])
            parts: list[list[Tensor]] = []
            if rows.decoding:
                blocks = rows.blocks.long()
                outputs = self._continued(index, blocks, blocks, partial(call, hidden[: rows.decoding].unsqueeze(1)))
                parts.append([out.squeeze(1) for out in outputs])
            for chunk in rows.parts:
                read, write = (slice(block, block + 1) for block in (chunk.read, chunk.write))
                own = partial(call, hidden[chunk.first : chunk.first + chunk.length].unsqueeze(0))
                if chunk.start:
                    outputs = self._continued(index, read, write, own)
                else:
                    outputs = self._computed(index, self._new[chunk.first], write, own)
                parts.append([out[0] for out in outputs])
            whole = (torch.cat(some) for some in zip(*parts, strict=True))
            return _as_returned([rows.in_step_order(each).unsqueeze(0) for each in whole])

        return run

    def _continued(self, index: int, read: Blocks, write: Blocks, call: Call) -> Sequence[Tensor]:
        """Call with the states in the blocks `read`, and store the new ones in the blocks `write`."""
        layer = self._used.layers[index]
        for place, pool in self._pools[index].items():
            # A copy: the library changes states in place, and the block read may stay as a checkpoint.
            _put(layer, place, pool[read].clone() if isinstance(read, slice) else pool[read])
        return self._computed(index, self._used, write, call)

    def _computed(self, index: int, cache: LibraryCache, write: Blocks, call: Call) -> Sequence[Tensor]:
        """Call with a cache, and store its states of a layer; it does not keep them: a batch of them may be large."""
        outputs, layer = _tensors(call(cache)), cache.layers[index]
        states = _states(layer)
        for place, pool in self._pools[index].items():
            pool[write] = states[place].to(pool.dtype)
            _put(layer, place, pool[:1])
        return outputs


def state_layers(model: LibraryModel) -> list[LibraryModule]:
    return [module for module in model.modules() if _state_argument(module)]


def _states(layer: Any) -> dict[Place, Tensor]:  # noqa: ANN401 – a layer of a cache of the library
    """Return the states in a layer of a cache: its tensors, and those in its dicts."""
    states: dict[Place, Tensor] = {}
    for name, value in vars(layer).items():
        if isinstance(value, Tensor):
            states[name, None] = value
        elif isinstance(value, dict):
            states |= {(name, key): each for key, each in value.items() if isinstance(each, Tensor)}
    return states


def _put(layer: Any, place: Place, state: Tensor) -> None:  # noqa: ANN401 – a layer of a cache of the library
    name, key = place
    if key is None:
        setattr(layer, name, state)
    else:
        getattr(layer, name)[key] = state


def _state_argument(module: Module) -> str:
    """Return the name of the argument with the state; "" for a module without a state."""
    has_convolution = any(isinstance(child, Conv1d) for child in module.children())
    names = inspect.signature(module.forward).parameters if has_convolution else {}
    return next((name for name in CACHE_ARGUMENTS if name in names), "")


def _tensors(output: Any) -> Sequence[Tensor]:  # noqa: ANN401 – the output of a layer of the library
    return [each for each in (output if isinstance(output, tuple) else (output,)) if isinstance(each, Tensor)]


def _as_returned(outputs: Sequence[Tensor]) -> Output:
    """Return one output, or several: the projections of attention are three."""
    return outputs[0] if len(outputs) == 1 else tuple(outputs)
