"""Layers with a state: gated delta nets, state-space layers and short convolutions, one sequence at a time.

The state of a sequence depends on all its tokens, and cannot be read from the KV cache. Each slot has the library's own cache
object with the states of its sequence. The layers of a flat batch are computed sequence by sequence, by the library's code. A
sequence that starts at position 0 gets a new state; so a prefix that another sequence computed cannot be reused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Conv1d, Module

from text_generation_shard.engines.torch.huggingface.library import LibraryConfig, LibraryModel, new_cache
from text_generation_shard.engines.torch.model.interface import Step

CACHE_ARGUMENTS = ("cache_params", "past_key_values")
"""Names under which layers get the cache object. Attention layers have the second name too, but no convolution."""

LibraryCache: TypeAlias = Any
"""A Cache of the library."""


class SlotStates:
    """The states of all slots, and the layers that have them."""

    def __init__(self, model: LibraryModel) -> None:
        self._config: LibraryConfig = model.config
        self._caches: dict[int, LibraryCache] = {}
        self._step: Step | None = None
        self.layers = [module for module in model.modules() if _state_argument(module)]
        for layer in self.layers:
            layer.forward = self._by_sequence(layer.forward, _state_argument(layer))

    def begin(self, step: Step | None) -> None:
        """Compute the following passes for the sequences of `step`; None: for a single sequence without a past."""
        self._step = step if self.layers else None
        for tokens in () if self._step is None else self._step.sequences():
            if tokens.start == 0:
                self._caches[tokens.slot] = new_cache(self._config)

    def _by_sequence(self, forward: Callable[..., Any], argument: str) -> Callable[..., Any]:
        """Return `forward` for a flat batch of the sequences of the step."""

        def run(hidden_states: Tensor, **named: object) -> Tensor:
            if self._step is None:
                return _tensor(forward(hidden_states, **named))
            result = torch.empty_like(hidden_states)
            for tokens in self._step.sequences():
                parts = [hidden_states[:, first : first + count] for first, count in tokens.places]
                own = named | {argument: self._caches[tokens.slot]}
                out = _tensor(forward(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), **own))
                at = 0
                for first, count in tokens.places:
                    result[:, first : first + count] = out[:, at : at + count]
                    at += count
            return result

        return run


def _state_argument(module: Module) -> str:
    """Return the name of the argument with the state; "" if the module is no layer with a state."""
    has_convolution = any(isinstance(child, Conv1d) for child in module.children())
    names = inspect.signature(module.forward).parameters if has_convolution else {}
    return next((name for name in CACHE_ARGUMENTS if name in names), "")


def _tensor(output: Any) -> Tensor:  # noqa: ANN401 – the output of a layer of the library
    result: Tensor = output[0] if isinstance(output, tuple) else output
    return result
