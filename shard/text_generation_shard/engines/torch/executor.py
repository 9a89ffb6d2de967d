"""The executor protocol: runs the forward passes of an engine, within the call on a CPU, asynchronously on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from text_generation_shard.engines.torch.device import DeviceEvent
from text_generation_shard.engines.torch.sampling.sampler import ThresholdSearch
from text_generation_shard.step.sequence import StepRow, StepRows


@dataclass(slots=True)
class Launched:
    """A forward pass that has been launched. On a GPU its tensors are not computed yet."""

    hidden: Tensor
    """[tokens, hidden]: hidden states of all tokens, as `Executor.logits` expects them."""
    prefills: list[tuple[StepRow, list[tuple[int, int, int]]]]
    """Rows that prefill and the location of their tokens: (offset in `hidden`, first position, number of tokens)."""
    logits: Tensor | None
    """[rows that sample, vocabulary], in order, persistent rows first; None if no row samples."""
    sampled: Tensor | None
    """int32 [2 · n], where n ≥ the number of rows that sample, if tokens were sampled greedily within the forward pass: n
    token ids, then the bits of n logprobs. The whole allocation, because a slice could not be copied in one transfer."""
    started: DeviceEvent
    computed: DeviceEvent | None
    """Recorded when the model has finished; None if nothing follows it in the step."""


class Executor(Protocol):
    """Holds the model and the KV cache of a device. Called from one thread."""

    @property
    def runs_ahead(self) -> bool:
        """True if a step is launched before the tokens of the previous one are known."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block."""
        ...

    @property
    def threshold_search(self) -> ThresholdSearch:
        """The search that the sampler uses on this device."""
        ...

    def launch(self, rows: StepRows, *, greedy: bool) -> Launched:
        """Launch the forward pass of some rows; `greedy` if every row takes its most probable token."""
        ...

    def logits(self, hidden: Tensor, first: int, end: int) -> Tensor:
        """Return logits [end - first, vocabulary] for rows first <= row < end of the last hidden states."""
        ...

    def store_sampled_tokens(self, rows: StepRows, token_ids: Tensor) -> None:
        """Store the sampled tokens of the rows that sample, as inputs of the next steps."""
        ...

    def allocate(self, num_blocks: int) -> None:
        """Replace the KV cache by one of `num_blocks` blocks. Raises torch.OutOfMemoryError."""
        ...

    def begin_measuring(self) -> None:
        """Measure peak memory from here on."""
        ...

    def spare_bytes(self) -> int:
        """Return the usable memory minus the peak since `begin_measuring`, in bytes."""
        ...

    def ready(self, max_tokens: int | None = None) -> None:
        """Prepare what depends on the final size of the KV cache; if given, only for steps of at most `max_tokens` tokens."""
        ...

    def is_broken_by(self, error: Exception) -> bool:
        """Return True if no step can be computed after this error of a step."""
        ...

    def on_broken(self, callback: Callable[[str], None]) -> None:
        """Register a callback for fatal failure. May be called from any thread, with the reason."""
        ...

    def close(self) -> None:
        """Free the device."""
        ...
