"""A Hugging Face model as the executors run it: by the library's layers, or by the native decoder with its weights.

find_decoder.py finds the decoder, for layers of the usual form.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from text_generation_common.one_line import one_line
from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.attention.step import Step
from text_generation_shard.engines.torch.batch.kv_cache import LayerShape
from text_generation_shard.engines.torch.engine.runner import Model
from text_generation_shard.engines.torch.layers.norm import RMSNorm
from text_generation_shard.engines.torch.layers.ops import Ops, ResidualStream
from text_generation_shard.engines.torch.models.huggingface.attention import (
    NAME,
    AttentionCall,
    AttentionRecorder,
    StepAttention,
    handled_by,
)
from text_generation_shard.engines.torch.models.huggingface.library import (
    HiddenStates,
    LibraryModel,
    base_of,
    parts_before_head,
    use_attention,
)
from text_generation_shard.engines.torch.models.huggingface.states import LibraryStates
from text_generation_shard.engines.torch.models.native.decoder import Decoder


class LibraryMLP:
    """An MLP that the library computes."""

    def __init__(self, module: Module) -> None:
        self._module = module

    def add(self, ops: Ops, stream: ResidualStream, before: RMSNorm | None, after: RMSNorm | None) -> None:
        normed = ops.norm(stream, before)
        output = self._module(normed.unsqueeze(0))
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        ops.add(stream, hidden.view(normed.shape), after)


RECORDED_TOKENS = 4
"""Tokens of the pass that records the attention calls."""


class TransformersModel:
    """Implements `Model`. Its hidden states are the outputs of the base model. Call `record` first.

    The last steps from hidden states to logits are known to the model's own `forward` alone. Logits are computed by it, with
    given hidden states in the place of the output that its LM head gets.
    """

    def __init__(self, model: LibraryModel, head_dims: Sequence[int] = ()) -> None:
        self.library = model
        self._head_dims = head_dims
        head = model.get_output_embeddings()
        self._vocabulary = getattr(head, "out_features", head.weight.shape[0])
        self.architecture = type(model).__name__
        self.base = base_of(model)
        """The part of the model whose output the LM head gets."""
        self._run_base = self.base.forward
        for part in parts_before_head(model):
            part.forward = partial(self._run_or_give, part.forward)
        self.states = LibraryStates(model)
        self._given: Any = None
        """The output that the part before the LM head is to give without running."""
        self.calls: list[AttentionCall] = []
        """The attention calls of a pass."""
        self.layers: list[LayerShape] = []
        """Shapes of the layers of the KV cache."""
        self.rules: list[tuple[float, float | None]] = []
        """Scale and softcap of the scores in each of them."""
        self.decoder: Callable[[Ops], Decoder] | None = None
        """Returns the native decoder that computes the same, if one was found."""

    def with_ops(self, ops: Ops) -> Model:
        """Return the native decoder with `ops` if one was found, else this model."""
        return self if self.decoder is None else self.decoder(ops)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.library.dtype
        return dtype

    def refusal(self, reason: str) -> EngineError:
        return EngineError(f"{self.architecture} is not served by transformers: {reason}")

    def failure(self, error: Exception) -> EngineError:
        """Return the error that refuses this model because its code raised `error`."""
        cause = f"{type(error).__name__}: {one_line(error)}"
        return self.refusal(f"its code fails with the engine's attention and cache: {cause}")

    @torch.inference_mode()
    def record(self) -> None:
        """Find the attention calls of a forward pass, and the shapes of their cache. Raises EngineError."""
        recorder = AttentionRecorder(self._head_dims)
        device = self.library.device
        ids = torch.zeros(1, RECORDED_TOKENS, dtype=torch.long, device=device)
        positions = torch.arange(RECORDED_TOKENS, device=device).unsqueeze(0)
        try:
            with handled_by(recorder), self.states.recorded():
                self._run_base(input_ids=ids, position_ids=positions, use_cache=False)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 – a model that is not served can fail in many ways
            raise self.failure(error) from None
        if not recorder.calls:
            raise self.refusal("no layer has attention through transformers' attention interface")
        self.calls, self.layers, self.rules = recorder.calls, recorder.layers, recorder.rules

    def forward(self, step: Step) -> Tensor:
        self.states.begin(step)
        ids = step.token_ids()
        inputs = {"input_ids": ids.unsqueeze(0)}
        if step.images is not None:
            inputs = {"inputs_embeds": step.images.embed(self.library.get_input_embeddings()(ids)).unsqueeze(0)}
        with handled_by(StepAttention(step, self.calls, self.layers)):
            output = self._run_base(
                **inputs,
                position_ids=step.positions.long().unsqueeze(0),
                use_cache=False,
            )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    predicts = 0

    def predict(self, step: Step, hidden: Tensor) -> Tensor:
        raise NotImplementedError("layers for drafts are loaded by the native decoder")

    def predicted(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError("layers for drafts are loaded by the native decoder")

    def allocate_states(self, blocks: int) -> None:
        self.states.allocate(blocks)

    def state_pools(self) -> list[Tensor]:
        return self.states.pools

    def cut_forward(self, max_tokens: int) -> Callable[[Step], Tensor] | None:
        return None if self.states.layers else self.forward

    def logits(self, hidden: Tensor, memory: Tensor | None = None, adapters: Tensor | None = None) -> Tensor:
        assert adapters is None, "models of transformers have none"
        self._given = HiddenStates(last_hidden_state=hidden.unsqueeze(0))
        try:
            logits = self._library_logits(torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device))
        finally:
            self._given = None
        return logits.float() if memory is None else memory[: len(logits)].copy_(logits)

    def logits_memory(self, rows: int) -> Tensor:
        return torch.empty(rows, self._vocabulary, dtype=torch.float32, device=self.library.device)

    @torch.inference_mode()
    def own_logits(self, token_ids: Tensor, attention: str = "eager") -> Tensor:
        """Return the logits [tokens, vocabulary] of one sequence with an attention function of the library."""
        self.states.begin(None)
        use_attention(self.library, attention)
        try:
            return self._library_logits(token_ids.unsqueeze(0).to(self.library.device))
        finally:
            use_attention(self.library, NAME)

    def _library_logits(self, token_ids: Tensor) -> Tensor:
        logits: Tensor = self.library(input_ids=token_ids, use_cache=False).logits[0]
        return logits

    def _run_or_give(self, run: Callable[..., Any], *arguments: Any, **named: Any) -> Any:  # noqa: ANN401 – a module's forward
        return run(*arguments, **named) if self._given is None else self._given
