"""What the host knows of the block tables on the device: so that a step is told only what is new in them."""

from __future__ import annotations

from text_generation_shard.engines.torch.cuda.step_plan import Update
from text_generation_shard.step.steady import StepRows


class SlotTables:
    """The block tables of all slots, [max_slots + 1, max_blocks]; the last slot is a dummy that belongs to nobody."""

    def __init__(self, max_slots: int, max_blocks: int) -> None:
        self.dummy_slot = max_slots
        self.max_blocks = max_blocks

    def updates(self, rows: StepRows) -> list[Update]:
        """What has to change before a step of `rows`; from now on that counts as known."""
        updates: list[Update] = []
        # Of the steady ones, only those that say so have anything new.
        sequences = [row.sequence for row in rows.others]
        if rows.steady is not None:
            sequences += [sequence for sequence in rows.steady.changed if sequence.is_held]
        for sequence in sequences:
            told = sequence.told_blocks
            if told < len(sequence.blocks):
                # A grant may reach beyond the longest sequence; nobody ever reads there.
                blocks = sequence.blocks[told : self.max_blocks]
                updates.extend(enumerate(blocks, sequence.slot * self.max_blocks + told))
                sequence.told_blocks = len(sequence.blocks)
        return updates
