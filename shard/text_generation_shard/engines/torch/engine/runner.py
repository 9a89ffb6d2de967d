"""The interface of a model, and of what runs its planned steps on one rank: every rank runs the same plans in the same order."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from text_generation_shard.engines.torch.attention.step import Step, StepImages
from text_generation_shard.engines.torch.batch.kv_cache import BLOCK_SIZE, CacheShape
from text_generation_shard.engines.torch.batch.step_plan import Padding, StepPlan
from text_generation_shard.engines.torch.device.copies import select_rows
from text_generation_shard.engines.torch.parallel.channel import PeerLossTranslator
from text_generation_shard.engines.torch.parallel.group import ParallelGroup

SLOT_COLUMNS = ("adapters", "states", "shifts")
"""Numbers of each slot: the LoRA adapter, 0 for none; the block of the state; the shift of the rotary positions."""


class Model(Protocol):
    """A model that an executor runs, with the weights of one rank."""

    predicts: int
    """Numbers of a hidden state that `predict` reads; 0: it has no layer for that."""

    def forward(self, step: Step) -> Tensor:
        """Return hidden states [tokens, hidden], as `logits` expects them; writes keys and values to the cache."""

    def predict(self, step: Step, hidden: Tensor) -> Tensor:
        """Return the hidden states from which `predicted` gives the token after the next one: those of a layer for drafts.

        `step` has the next token at each position, `hidden` [tokens, predicts] the output of `forward` there, or of this one.
        """

    def predicted(self, hidden: Tensor) -> Tensor:
        """Return the most probable tokens, int64 [rows], for some hidden states of `predict`."""
        ...

    def allocate_states(self, blocks: int) -> None:
        """Replace the states of the layers by `blocks` blocks of zeros, if the cache has a group of states."""

    def state_pools(self) -> list[Tensor]:
        """Return the states of the layers, [blocks, …] each."""

    def cut_forward(self, max_tokens: int) -> Callable[[Step], Tensor] | None:
        """Return `forward` for steps of at most `max_tokens` tokens, to be captured in pieces: see `PiecewiseGraphs`.

        Between its attentions it depends on data on the device alone. None: it does not.
        """

    def logits(self, hidden: Tensor, memory: Tensor | None = None, adapters: Tensor | None = None) -> Tensor:
        """Return logits [rows, vocabulary], the same on every rank, in the first rows of `memory` if given: see `logits_memory`.

        `adapters` are those of the rows, as `Step.adapters`.
        """

    def logits_memory(self, rows: int) -> Tensor:
        """Allocate a buffer for the logits of `rows` rows."""


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    normed: Tensor
    """[tokens, hidden]: input of the LM head."""
    logits: Tensor | None
    """float32 [rows that sample, and padding, vocabulary], persistent rows first; None if no row samples."""
    sampled: Tensor | None
    """int32 [2 · n], n ≥ the number of rows that sample, if sampled greedily: n token ids, then the bits of n logprobs. The
    whole allocation, because a slice could not be copied in one transfer."""
    carried: Tensor | None = None
    """[tokens, predicts]: what `Model.predict` reads; None: `normed`."""
    adapters: Tensor | None = None
    """As `Step.adapters`, for the rows of `normed`."""


class Runner(ABC):
    """One rank's model, KV cache and block tables. Steps run in inference mode.

    Block tables and last tokens have one row more than there are slots: it belongs to the dummy slot, which pads the rows of a
    graph.
    """

    def __init__(
        self,
        model: Model,
        group: ParallelGroup,
        shape: CacheShape,
        max_slots: int,
        max_sequence_length: int,
        *,
        shifts_positions: bool,
    ) -> None:
        self._model = model
        self.predicts = model.predicts
        self._group = group
        self._translate_peer_loss = PeerLossTranslator(group.channel)
        self._shape = shape
        self.device = shape.device
        self.windows, self.kinds, self.block_bytes = shape.windows, shape.kinds, shape.block_bytes
        """Sliding windows of the groups of KV blocks; all groups of the cache, and bytes of their blocks."""
        self.bidirectional_images = any(layer.bidirectional_images for layer in shape.layers)
        self._max_slots = max_slots
        self.max_blocks = -(-max_sequence_length // BLOCK_SIZE)
        """Blocks of the longest sequence."""
        self.table_rows = max_slots + 1
        """Rows of the block table of a group."""
        sizes = len(self.windows), self.table_rows, self.max_blocks
        cells = math.prod(sizes)
        self._cells = torch.zeros(cells + 3 * self.table_rows, dtype=torch.int32, device=self.device)
        """The block tables of the groups, then SLOT_COLUMNS. The updates of a plan change all of them."""
        self._tables = self._cells[:cells].view(sizes)
        self._slot_adapters, self._slot_states, shifts = self._cells[cells:].view(3, -1)
        self._slot_shifts = shifts if shifts_positions else None
        """None if all rotary positions are positions."""
        self._last_tokens = torch.zeros(max_slots + 1, dtype=torch.int32, device=self.device)
        self._adapters: Tensor | None = None
        """The LoRA adapters of the tokens of the last step."""
        self._carried = self._drafted = torch.empty(0)
        """The rows of the last step or prediction that `predict` reads, and the tokens of the latter."""

    def slot_cell(self, column: str, slot: int) -> int:
        """Return the cell of a plan's updates that has one of SLOT_COLUMNS of a slot."""
        return self._tables.numel() + SLOT_COLUMNS.index(column) * self.table_rows + slot

    def _allocate_states(self, num_blocks: Sequence[int]) -> None:
        """Allocate the states, if there are any, and one more block: that of the dummy slot."""
        if self._shape.state_bytes:
            self._model.allocate_states(num_blocks[-1] + 1)
            self._slot_states[self._max_slots] = num_blocks[-1]

    @property
    @abstractmethod
    def cache(self) -> Sequence[Tensor]:
        """The KV cache of each layer: see `CacheShape.allocate`."""

    def block_parts(self) -> list[list[Tensor]]:
        """Return the parts of the blocks of each group, as views [blocks, bytes] of the cache."""
        pools: list[list[Tensor]] = [[] for _ in self.kinds]
        for group, layer in zip(self._shape.groups, self.cache, strict=True):
            pools[group].append(layer)
        if self._shape.state_bytes:
            pools[-1] = self._model.state_pools()
        return [[pool.flatten(1).view(torch.uint8) for pool in group if pool[0].numel()] for group in pools]

    @abstractmethod
    def allocate(self, num_blocks: Sequence[int]) -> None:
        """Replace the KV cache by one with so many blocks of each group; drops the graphs."""

    def capture(self, *, only_largest: bool = False, max_tokens: int | None = None, part: slice = slice(None)) -> int:
        """Capture the graphs, if the device has any; returns the memory weight of a full set, in whole-step graphs.

        With `max_tokens`, only those of at most that number of tokens; with `part`, of the others only some, by their place.
        """
        return 0

    def padding(self, rows: int, updates: int) -> Padding:
        return Padding(rows, updates, self._max_slots, (0, 0))

    def drop_graphs(self) -> None:  # noqa: B027 – most devices have none
        """Free the graphs, if there are any."""

    def start(self, plan: StepPlan, images: StepImages | None = None) -> ForwardOutput:
        """Launch a step. The plan's memory may be reused when the step has finished. Raises GroupBroken, like those below."""
        self._carried = torch.empty(0)  # the memory is free for the step
        with self._translate_peer_loss:
            output = self._start(plan, images)
        self._adapters = output.adapters
        if self.predicts:
            self._carried = output.normed if output.carried is None else output.carried
        return output

    @abstractmethod
    def _start(self, plan: StepPlan, images: StepImages | None) -> ForwardOutput:
        """Launch a step."""

    def predict(
        self,
        plan: StepPlan,
        inputs: Sequence[int],
        outputs: Sequence[int],
        images: StepImages | None = None,
        *,
        drafts: bool,
    ) -> Tensor:
        """Launch `Model.predict`; return the most probable next tokens at the tokens `outputs`, in memory of their own.

        Its tokens read rows `inputs` of the last step, or of the last call. `drafts`: the latter, whose tokens they are, too, at
        positions that no step has computed. Of `images` it reads the rotary positions.
        """
        hidden = select_rows(self._carried, inputs)
        ids = select_rows(self._drafted, inputs) if drafts else None
        with self._translate_peer_loss:
            self._carried, self._drafted = self._predict(plan, ids, hidden, outputs, images)
        return self._drafted

    @abstractmethod
    def _predict(
        self, plan: StepPlan, ids: Tensor | None, hidden: Tensor, rows: Sequence[int], images: StepImages | None
    ) -> tuple[Tensor, Tensor]:
        """Launch `Model.predict` with `hidden`, rows for the first tokens; return what the next call reads, and tokens, at `rows`.

        `ids` are drafts in the place of the first tokens of the plan; None: there are none.
        """

    def broadcast_sampled_tokens(self, slots: Tensor, token_ids: Tensor) -> None:
        """Store the sampled tokens of some slots for the next steps and broadcast them; on rank 0."""
        self._last_tokens.index_copy_(0, slots, token_ids.int())
        self.receive_sampled_tokens()

    def receive_sampled_tokens(self) -> None:
        """Receive the sampled tokens that rank 0 broadcasts."""
        with self._translate_peer_loss:
            self._group.broadcast(self._last_tokens)

    def broadcast_images(self, images: StepImages) -> None:
        """Overwrite the images of the next step with those of rank 0."""
        with self._translate_peer_loss:
            for tensor in images.tensors:
                if tensor is not None:
                    self._group.broadcast(tensor)

    def logits(self, normed: Tensor, first: int, end: int) -> Tensor:
        """Return logits [end - first, vocabulary] for rows first <= row < end of `normed`, the hidden states of the last step."""
        with self._translate_peer_loss:
            adapters = None if self._adapters is None else self._adapters[first:end]
            return self._model.logits(normed[first:end], adapters=adapters)
