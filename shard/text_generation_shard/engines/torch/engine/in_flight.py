"""StepInFlight: a step from its launch until its tokens are recorded."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import repeat

from torch import Tensor

from text_generation_shard.engine import StepResult, TopTokens
from text_generation_shard.engines.torch.device.copies import DeviceEvent
from text_generation_shard.engines.torch.engine.runner import ForwardOutput
from text_generation_shard.engines.torch.sampling.sampler import TopCandidates
from text_generation_shard.step.masks import Mask
from text_generation_shard.step.sequence import Sequence, StepRow, StepRows


@dataclass(slots=True)
class StepInFlight:
    rows: StepRows
    prefills: list[tuple[StepRow, int]]
    """Rows that prefill, and the offset of their first token in the hidden states."""
    started: DeviceEvent
    output: ForwardOutput
    """Deleted when the tokens are sampled, because its tensors are large. On a GPU they are not computed yet."""
    computed: DeviceEvent | None
    """Recorded when the model has finished; None if nothing follows it in the step."""
    masking: Future[dict[int, Mask]] | None = None
    is_last: bool = True
    """False once another one is launched: drafts cannot follow from its hidden states any more."""
    masks: dict[int, Mask] = field(default_factory=dict)
    """Masks of rows with a grammar, by the index of the sampled token."""
    late: dict[int, Sequence] = field(default_factory=dict)
    """Sequences whose mask is not ready, by index."""
    sampled: Tensor | None = None
    """Same layout as `ForwardOutput.sampled`; on the host and valid once `done` has completed."""
    scores: list[Callable[[], None]] = field(default_factory=list)
    top_token_rows: list[tuple[StepRow, int]] = field(default_factory=list)
    """Sampling rows that asked for top tokens, and the place of each sampled token in its row; `tops` holds their candidates."""
    tops: TopCandidates | None = None
    done: DeviceEvent | None = None
    began_ahead: bool = False
    """True if it began before the tokens of the step before were known."""

    def top_tokens(self, result: StepResult) -> list[TopTokens]:
        """Return the top tokens of the tokens in its result."""
        if self.tops is None:
            return []
        counts = dict(zip(result.slots, result.token_counts or repeat(1)))  # noqa: B905 – repeat has no end
        return [
            TopTokens(row.sequence.slot, place, *self.tops.top(number, row.sequence.top_n))
            for number, (row, place) in enumerate(self.top_token_rows)
            if place < counts.get(row.sequence.slot, 0)
        ]
