"""The host's record of the block tables on the device: a step sends only the changes."""

from __future__ import annotations

from text_generation_shard.engines.torch.cuda.step_plan import TableUpdate
from text_generation_shard.step.rows import StepRows


class SlotTables:
    """The block tables of all slots, [max_slots + 1, max_blocks]; the last slot is the unused dummy slot."""

    def __init__(self, max_slots: int, max_blocks: int) -> None:
        self.dummy_slot = max_slots
        self.max_blocks = max_blocks

    def updates(self, rows: StepRows) -> list[TableUpdate]:
        """Return the updates that a step of `rows` needs, and mark them as sent."""
        updates: list[TableUpdate] = []
        # Of the persistent rows, only those marked as changed have new blocks.
        sequences = [row.sequence for row in rows.others]
        if rows.persistent is not None:
            sequences += [sequence for sequence in rows.persistent.changed if sequence.is_held]
        for sequence in sequences:
            known = sequence.synced_blocks
            if known < len(sequence.blocks):
                # Blocks beyond the longest sequence are never read.
                blocks = sequence.blocks[known : self.max_blocks]
                updates.extend(enumerate(blocks, sequence.slot * self.max_blocks + known))
                sequence.synced_blocks = len(sequence.blocks)
        return updates
