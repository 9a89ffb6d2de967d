"""The blocks of states to which the chunks of a prompt write, and orders that add them."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import pytest
from engine_infos import GPU_ENGINE

from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.values import Stopping
from text_generation_shard.engine import Media, NewSequence, Orders
from text_generation_shard.step.table import SequenceTable

INFO = replace(GPU_ENGINE, max_images=1)


def test_chunks_that_waited_are_divided_where_they_leave_a_second_checkpoint() -> None:
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
    assert not written, "few tokens before an image wait for it"
    table.sequences[0].image_limit = 12
    for _ in range(2):
        step()
    assert written == [(0, 8, 5, 6, (5, 4)), (8, 4, 6, 7, (0, 0))], "a step leaves one checkpoint before its end"


@pytest.mark.parametrize(
    ("added", "problem"),
    [
        (((8, 3),), None),
        (((8, 3), (12, 4)), None),
        (((4, 3),), "position 4 of an added state is not a multiple of 4 between 8"),
        (((10, 3),), "position 10 of an added state is not a multiple of 4 between 8"),
        (((16, 3),), "position 16 of an added state is not a multiple of 4 between 8, what is ordered, and 15"),
        (((12, 3), (12, 4)), "position 12 of an added state is not a multiple of 4 between 13"),
        (((12, 8),), "a KV block is not one of 8"),
        (((12,),), "an added state needs a position and a block"),
        (((8, 3, 4),), "an added state needs a position and a block"),
    ],
)
def test_added_states_are_checked(added: tuple[tuple[int, ...], ...], problem: str | None) -> None:
    table = SequenceTable(INFO, (CacheGroup(16), CacheGroup(8, is_state=True)))
    prompt = tuple(range(15))
    others = [
        NewSequence(slot, prompt, Stopping(2), blocks=blocks, further_blocks=((0, (slot,)),))
        for slot, blocks in enumerate(((0, 1, 2, 3), (4, 5, 6, 7)))
    ]
    assert not table.apply(Orders(1, placements=tuple(others), prefill=((0, 8), (1, 8))))
    further = (tuple((0, numbers) for numbers in added),)
    failures = table.apply(Orders(2, further_allocations=further))
    assert [(each.slot, each.message[: len(problem or "")]) for each in failures] == ([(0, problem)] if problem else [])
    assert 1 in table.sequences, "the other sequence goes on"
