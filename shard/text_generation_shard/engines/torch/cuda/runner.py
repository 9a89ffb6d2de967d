"""Runs steps on one rank's device, as their plans say: every rank runs the same ones in the same order."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from text_generation_shard.engines.torch.cuda.forward import DeviceStep, Forward
from text_generation_shard.engines.torch.cuda.graphs import DecodeGraphs, GraphPool, Outcome
from text_generation_shard.engines.torch.cuda.layers import ModelWeights
from text_generation_shard.engines.torch.cuda.parallel.channel import NamingTheLost
from text_generation_shard.engines.torch.cuda.parallel.group import Group
from text_generation_shard.engines.torch.cuda.pieces import Pieces, Recorder
from text_generation_shard.engines.torch.cuda.step_plan import ALIGNED, COLUMNS, StepPlan
from text_generation_shard.engines.torch.cuda.toolbox import Toolbox
from text_generation_shard.engines.torch.kv_cache import BLOCK_SIZE, CacheShape
from text_generation_shard.engines.torch.model_config import ModelConfig


class Runner:
    """One rank's model, KV pool, block tables and graphs. Steps and what belongs to them are computed in inference mode.

    Tables and last tokens have one row more than there are slots, the pool one block more than there are blocks: they
    belong to the dummy slot, which pads the rows of a graph.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        toolbox: Toolbox,
        group: Group,
        shape: CacheShape,
        max_slots: int,
    ) -> None:
        self._toolbox = toolbox
        self._group = group
        self._naming_the_lost = NamingTheLost(group.channel)
        self._shape = shape
        self._device = shape.device
        self._max_slots = max_slots
        self.max_blocks = -(-config.max_sequence_length // BLOCK_SIZE)
        """Blocks of the longest sequence."""
        self._tables = torch.zeros(max_slots + 1, self.max_blocks, dtype=torch.int32, device=self._device)
        self._last_tokens = torch.zeros(max_slots + 1, dtype=torch.int32, device=self._device)
        self._forward = Forward(config, weights, toolbox, group, self._tables, self._last_tokens)
        self._cache = self._pool(0)
        self.graphs: DecodeGraphs | None = None
        self._pieces: Pieces | None = None

    @torch.inference_mode()
    def allocate(self, num_blocks: int) -> None:
        """Have a KV pool of so many blocks, and no graphs."""
        self.drop_graphs()
        # The old pool goes before the new one comes: they need not fit side by side.
        self._cache = self._pool(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._cache = self._pool(num_blocks + 1)
        self._tables[self._max_slots] = num_blocks

    @torch.inference_mode()
    def capture(self, *, only_largest: bool = False) -> int:
        """Make the graphs, where the device has such a thing; how many a full set is to be counted as."""
        if self._device.type != "cuda":
            return 0
        self.drop_graphs()
        pool = GraphPool()
        dummy_update = (self._max_slots * self.max_blocks, len(self._cache[0]) - 1)
        # What all decoding graphs have in common: each with logits of its own would take gigabytes.
        run = partial(self._run, logits=self._forward.logits_memory(self._max_slots))
        self.graphs = DecodeGraphs(self._max_slots, self._max_slots, dummy_update, run)
        self.graphs.capture(pool, only_largest=only_largest)
        pieces = self.cut(lambda works: [graph.replay for graph, _ in pool.record(works)], only_largest=only_largest)
        return len(self.graphs) + len(pieces)

    def cut(self, record: Recorder, *, only_largest: bool = False) -> Pieces:
        """From now on compute steps with chunks in pieces, as far as there are some of their size."""
        self._pieces = Pieces(self._forward, self._cache, self._max_slots)
        self._pieces.record(record, only_largest=only_largest)
        return self._pieces

    def drop_graphs(self) -> None:
        """Free them."""
        self.graphs = self._pieces = None

    def start(self, plan: StepPlan) -> Outcome:
        """Start a step; the plan's numbers may be used again only when it is over. Raises GroupBroken, as do those below."""
        numbers = torch.from_numpy(plan.numbers)
        with self._naming_the_lost:
            outcome = None if self.graphs is None else self.graphs.replay(plan, numbers)
            return outcome or self._run(plan, numbers.to(self._device, non_blocking=True))

    def tell_chosen(self, slots: Tensor, token_ids: Tensor) -> None:
        """Let the steps to come know what was chosen for some slots; on the leading rank."""
        self._last_tokens.index_copy_(0, slots, token_ids.int())
        self.hear_chosen()

    def hear_chosen(self) -> None:
        """On the other ranks: take over what `tell_chosen` tells."""
        with self._naming_the_lost:
            self._group.broadcast(self._last_tokens)

    def logits(self, normed: Tensor) -> Tensor:
        """float32 [rows, vocabulary]: of a few of the hidden states of a step."""
        with self._naming_the_lost:
            return self._forward.logits(normed)

    def _pool(self, num_blocks: int) -> tuple[Tensor, ...]:
        """Of each layer [blocks, key or value, KV heads, BLOCK_SIZE, head_dim]. Zeros: what no sequence wrote is finite."""
        shape = self._shape
        return torch.zeros(
            (shape.num_layers, num_blocks, 2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim),
            dtype=shape.dtype,
            device=shape.device,
        ).unbind()

    def _run(self, plan: StepPlan, numbers: Tensor, logits: Tensor | None = None) -> Outcome:
        """Compute a step whose numbers are on the device, its logits in memory that is given, or in some of its own."""
        columns = {name: numbers[start:end] for name, (start, end) in zip(COLUMNS, plan.spans, strict=True)}
        if plan.sizes.updates:
            self._toolbox.update_tables(columns["cells"], columns["blocks"], self._tables)
        if plan.sizes.chunks:
            self._toolbox.plan_chunks(plan, columns["pages"])
        normed = self._normed(plan, numbers)
        if not plan.choosing:
            return Outcome(normed, None, None)
        choosing, slots = normed, columns["slots"]
        if plan.sizes.chunks:
            choosing, slots = normed.index_select(0, columns["places"]), slots.index_select(0, columns["places"])
        logits = self._forward.logits(choosing, logits)
        if not plan.greedy:
            return Outcome(normed, logits, None)
        # Aligned, as the columns of a plan are.
        width = -(-plan.choosing // ALIGNED) * ALIGNED
        chosen = torch.empty(2 * width, dtype=torch.int32, device=self._device)
        token_ids, bits = chosen.view(2, width)[:, : plan.choosing]
        self._toolbox.choose_greedily(logits, slots, self._last_tokens, token_ids, bits.view(torch.float32))
        return Outcome(normed, logits, chosen)

    def _normed(self, plan: StepPlan, numbers: Tensor) -> Tensor:
        # The columns of tokens are the first three, as long as each other and so as far apart.
        (start, _), (second, _), *_ = plan.spans
        columns = numbers[start:].as_strided((3, plan.sizes.tokens), (second - start, 1))
        step = DeviceStep(columns, plan.decoding)
        if self._pieces is not None and plan.sizes.chunks:
            normed = self._pieces.run(step)
            if normed is not None:
                return normed
        return self._forward(step, self._cache)
