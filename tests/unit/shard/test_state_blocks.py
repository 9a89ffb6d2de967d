"""Chunks that wait for an image write each to the block of the state that was ordered for it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

from engine_infos import GPU_ENGINE

from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.values import Stopping
from text_generation_shard.engine import Media, NewSequence, Orders
from text_generation_shard.step.table import SequenceTable

INFO = replace(GPU_ENGINE, max_images=1)


def test_chunks_that_waited_are_divided_at_the_blocks_of_states() -> None:
    table = SequenceTable(INFO, (CacheGroup(16), CacheGroup(8, is_state=True)))
    image = Media(offset=2, tokens=3, digest=b"", data=b"")
    new = NewSequence(
        0,
        tuple(range(12)),
        Stopping(max_new_tokens=2),
        blocks=(0, 1, 2, 3),
        further_blocks=((0, (5,)),),
        media=(image,),
        images=Future(),
    )
    assert not table.apply(Orders(1, placements=(new,), prefill=((0, 4),)))
    written: list[tuple[int, int, int, int, tuple[int, int]]] = []

    def step() -> None:
        rows = table.rows()
        for row in rows.others:
            states = row.sequence.state_read, row.sequence.state_write
            written.append((row.start, row.length, *states, row.checkpoint))
        table.begin(rows)

    step()
    for number, block in ((2, 6), (3, 7)):
        state = 4 * number - 4, block
        assert not table.apply(Orders(number, further_allocations=(((0, state),),), prefill=((0, 4),)))
    step()
    assert written == [(0, 2, 5, 5, (0, 0))], "only the tokens before the image"
    table.sequences[0].image_limit = 12
    for _ in range(2):
        step()
    assert written[1:] == [(2, 6, 5, 6, (5, 4)), (8, 4, 6, 7, (0, 0))], "a step leaves one checkpoint before its end"
