"""The positions of a prompt at which a sequence leaves a checkpoint of its states: where another prompt is likely to go on.

A checkpoint is as large as the KV of thousands of tokens, so it is left

    at the ends of the turn       where the next turn can stop to repeat the prompt, as the template shows: near the marker of the
                                  answer, or before what moves to the next question. Without a template, at the last block of the
                                  prompt
    at a branch                   where another prompt left the path of this one in the tree, as after a shared system prompt
    every SPACING tokens          of a long prompt, and at its end if the turn ends more than two blocks before, as with a
                                  system message in the last question, while there are free blocks: evicted before all others

and all at the last block boundary before. A shorter way than MIN_GAIN tokens is computed again.
"""

from collections.abc import Sequence
from typing import NamedTuple

SPACING = 8192
MIN_GAIN = 128


class StateCheckpoint(NamedTuple):
    position: int
    is_spare: bool = False
    """It takes no block of another, and is evicted first."""


def turn_blocks(turn_ends: Sequence[int], length: int, block_size: int) -> set[int]:
    """Return the numbers of whole blocks before the ends of a turn of `length` tokens; its own end if none are known."""
    return {min(end, length - 1) // block_size for end in turn_ends or (length,)}


def checkpoints(
    length: int, turn_ends: Sequence[int], branch: int, cached: int, block_size: int
) -> list[StateCheckpoint]:
    """Return the checkpoints for `length` known tokens, the last one first. All are after `cached` and before `length`.

    `turn_ends`: the ends of the turn, if they are known. `branch`: the tokens that it shares with a prompt that goes on otherwise.
    """
    ends = [count * block_size for count in turn_blocks(turn_ends, length, block_size)]
    wanted = dict.fromkeys(range(SPACING, length, SPACING), True)
    if branch - cached >= MIN_GAIN and all(abs(end - branch) >= MIN_GAIN for end in ends):
        wanted[branch] = False
    if length - max(ends) > 2 * block_size:
        wanted[(length - 1) // block_size * block_size] = True
    wanted |= dict.fromkeys(ends, False)
    return [StateCheckpoint(*each) for each in sorted(wanted.items(), reverse=True) if each[0] > cached]
