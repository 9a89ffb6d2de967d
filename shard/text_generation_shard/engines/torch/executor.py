"""What computes an engine's steps: on a CPU at once, on a GPU while the host goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from text_generation_shard.engines.torch.cuda.marks import Mark
from text_generation_shard.engines.torch.sampling.thresholds import ThresholdSearch
from text_generation_shard.step.sequence import Row
from text_generation_shard.step.steady import StepRows


@dataclass(slots=True)
class Launched:
    """A forward pass that has been launched. What its tensors hold may be known to the device only."""

    hidden: Tensor
    """[tokens, hidden] of all tokens, ready for `Executor.logits`."""
    places: list[tuple[Row, list[tuple[int, int, int]]]]
    """Rows of prompts, and where their tokens are: (offset in `hidden`, first position, tokens)."""
    logits: Tensor | None
    """[rows that sample, vocabulary], in order: the steady ones do; None if none samples."""
    chosen: Tensor | None
    """int32 [2 · n], n the rows that sample or a few more, if they were chosen greedily along with it: n token ids, and the bits
    of their logprobs. The whole of the memory they were left in: cut to size it could not be copied at one go."""
    started: Mark
    computed: Mark | None
    """When the model's part is done; None if nothing comes after it."""


class Executor(Protocol):
    """Holds the model and the KV pool of a device. Called from one thread."""

    @property
    def runs_ahead(self) -> bool:
        """Whether a step is to be launched before the tokens of the one before it are known."""
        ...

    @property
    def block_bytes(self) -> int:
        """Memory of a KV block."""
        ...

    @property
    def threshold_search(self) -> ThresholdSearch:
        """The search that the sampler uses on this device."""
        ...

    def launch(self, rows: StepRows, *, greedy: bool) -> Launched:
        """Start the forward pass of some rows, `greedy` if nothing but the most probable token can be chosen in any."""
        ...

    def logits(self, hidden: Tensor, first: int, end: int) -> Tensor:
        """[end - first, vocabulary] for rows first <= row < end of the hidden states launched last."""
        ...

    def tell_chosen(self, rows: StepRows, token_ids: Tensor) -> None:
        """What was chosen for rows that sample, for the steps to come."""
        ...

    def allocate(self, num_blocks: int) -> None:
        """Have a KV pool of so many blocks. Raises torch.OutOfMemoryError."""
        ...

    def begin_measuring(self) -> None:
        """Count the memory of steps from here on."""
        ...

    def spare_bytes(self) -> int:
        """What is left of the memory to be used beside all that was ever in use at once since `begin_measuring`."""
        ...

    def ready(self) -> None:
        """The pool has its final size: prepare what hangs on it."""
        ...

    def is_broken_by(self, error: Exception) -> bool:
        """Whether no step can be computed any more after this error of one."""
        ...

    def on_broken(self, tell: Callable[[str], None]) -> None:
        """Have `tell` called, from any thread, with the reason why no step can be computed any more, if so it is."""
        ...

    def close(self) -> None:
        """Free the device."""
        ...
