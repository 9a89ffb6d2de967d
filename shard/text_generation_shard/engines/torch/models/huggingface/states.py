"""Layers with a state: gated delta nets, state-space layers and short convolutions.

The state of a sequence depends on all its tokens, and cannot be read from the KV cache. Each such layer has a pool of states, one
for each slot. The layers of a flat batch are computed by the library's code: sequences that are continued by one token as one
batch, which a CUDA graph can capture, the others one by one. The states of a batch are copied from the pool to the library's
cache object and back. A sequence that starts at position 0 gets a new state; so a prefix that another sequence computed cannot be
reused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Conv1d, Module

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.attention.step import SequenceTokens, SingleTokens, Step
from text_generation_shard.engines.torch.models.huggingface.library import (
    LibraryConfig,
    LibraryModel,
    base_of,
    new_cache,
)

CACHE_ARGUMENTS = ("cache_params", "past_key_values")
"""Names under which layers get the cache object. Attention layers have the second name too, but no convolution."""

LibraryCache: TypeAlias = Any
"""A Cache of the library."""
Output: TypeAlias = Tensor | tuple[Tensor, ...]
Place: TypeAlias = tuple[str, object]
"""An attribute of a layer of a library cache, and the key of a state in it; None if the attribute is the state."""
Call: TypeAlias = Callable[[LibraryCache], Any]
"""Computes a layer with the states of a cache, which it updates."""


class SlotStates:
    """The states of all slots, and the layers that have them."""

    def __init__(self, model: LibraryModel) -> None:
        self._config: LibraryConfig = base_of(model).config
        self._slots = 0
        self._used: LibraryCache = None
        """Scratch cache object of the library; the states of the current batch are swapped into it."""
        self._pools: dict[int, dict[Place, Tensor]] = {}
        """For each layer, its states: [slots + 1, …]. The last is that of padding."""
        self._recorded: LibraryCache = None
        self._new: dict[int, LibraryCache] = {}
        """The caches of the sequences that start in this step, by slot."""
        self._single: SingleTokens | None = None
        """None: a pass for a single sequence without a past."""
        self._others: list[SequenceTokens] = []
        self.layers = [module for module in model.modules() if _state_argument(module)]
        for layer in self.layers:
            layer.forward = self._by_sequence(layer.forward, _state_argument(layer), int(layer.layer_idx))

    @property
    def bytes_each(self) -> int:
        """The size of the states of one slot."""
        return sum(state[0].nbytes for pool in self._pools.values() for state in pool.values())

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the shapes of the states in a pass. Raises EngineError if the library keeps them in an unknown form."""
        self._single = None
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
            self.allocate(self._slots)
        finally:
            self._recorded = None

    def allocate(self, slots: int) -> None:
        """Allocate the states of `slots` slots. Call `recorded` first."""
        self._slots = slots
        for pool in self._pools.values():
            for place, state in pool.items():
                pool[place] = torch.zeros(slots + 1, *state.shape[1:], dtype=state.dtype, device=state.device)

    def begin(self, step: Step | None) -> None:
        """Compute the following passes for the sequences of `step`; None: for a single sequence without a past."""
        if step is None or not self.layers:
            self._single = None
            return
        self._single, self._others = step.single_tokens(), step.sequences()
        self._new = {tokens.slot: new_cache(self._config) for tokens in self._others if tokens.start == 0}

    def _by_sequence(self, forward: Callable[..., Any], argument: str, index: int) -> Callable[..., Any]:
        """Return `forward` for a flat batch of the sequences of the step."""

        parameters = list(inspect.signature(forward).parameters)

        def run(hidden_states: Tensor, *given: object, **named: object) -> Output:
            named |= dict(zip(parameters[1:], given, strict=False))
            if self._single is None:
                return _as_returned(_tensors(forward(hidden_states, **named | {argument: self._recorded})))

            def call(own: Tensor, cache: LibraryCache) -> Any:  # noqa: ANN401 – the output of a layer of the library
                return forward(own, **named | {argument: cache})

            results: list[Tensor] = []

            def put(places: Tensor | slice, outputs: Sequence[Tensor]) -> None:
                if not results:
                    results.extend(out.new_empty(1, hidden_states.shape[1], *out.shape[1:]) for out in outputs)
                for result, out in zip(results, outputs, strict=True):
                    result[0, places] = out

            single, hidden = self._single, hidden_states[0]
            if len(single.slots):
                rows = hidden[single.places].unsqueeze(1)
                outputs = self._continued(index, single.slots, partial(call, rows))
                put(single.places, [out.squeeze(1) for out in outputs])
            for tokens in self._others:
                parts = [hidden_states[:, first : first + count] for first, count in tokens.places]
                whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
                outputs = self._sequence(index, tokens, partial(call, whole))
                at = 0
                for first, count in tokens.places:
                    put(slice(first, first + count), [out[0, at : at + count] for out in outputs])
                    at += count
            return _as_returned(results)

        return run

    def _sequence(self, index: int, tokens: SequenceTokens, call: Call) -> Sequence[Tensor]:
        slot = slice(tokens.slot, tokens.slot + 1)
        if tokens.start:
            return self._continued(index, slot, call)
        cache = self._new[tokens.slot]
        outputs = _tensors(call(cache))
        self._store(index, slot, cache)
        return outputs

    def _continued(self, index: int, slots: Tensor | slice, call: Call) -> Sequence[Tensor]:
        """Call with the states of `slots`, and store the new ones."""
        layer = self._used.layers[index]
        for place, pool in self._pools[index].items():
            _put(layer, place, pool[slots])
        outputs = _tensors(call(self._used))
        self._store(index, slots, self._used)
        return outputs

    def _store(self, index: int, slots: Tensor | slice, cache: LibraryCache) -> None:
        """Store the states of a layer of a cache, which does not keep them: a batch of them may be large."""
        layer = cache.layers[index]
        states = _states(layer)
        for place, pool in self._pools[index].items():
            pool[slots] = states[place].to(pool.dtype)
            _put(layer, place, pool[:1])


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
    """Return the tensors that a layer returns."""
    return [each for each in (output if isinstance(output, tuple) else (output,)) if isinstance(each, Tensor)]


def _as_returned(outputs: Sequence[Tensor]) -> Output:
    """Return one output, or several: the projections of attention are three."""
    return outputs[0] if len(outputs) == 1 else tuple(outputs)
