"""Checks of orders against the sequences that an engine holds and the groups of its cache."""

from collections.abc import Mapping

from text_generation_proto.cache_groups import CacheGroup
from text_generation_shard.engine import EngineInfo, NewSequence
from text_generation_shard.sequence_checks import sequence_problem
from text_generation_shard.step.sequence import Sequence

Groups = tuple[CacheGroup, ...]


def new_sequence_problem(
    new: NewSequence, info: EngineInfo, groups: Groups, sequences: Mapping[int, Sequence]
) -> str | None:
    """Return the first problem of a placement beside `sequences`, those that are held, by slot; None if it has none."""
    if new.slot in sequences:
        return f"slot {new.slot} is taken"
    if (
        new.adapter
        and info.max_loras
        and (len({each.adapter for each in sequences.values()} - {"", new.adapter}) >= info.max_loras)
    ):
        return f"more LoRA adapters at a time than the {info.max_loras} of --max-loras"
    if problem := sequence_problem(new, info) or blocks_problem(groups, 0, new.blocks):
        return problem
    if len(new.further_blocks) != len(groups) - 1:
        return f"it has KV blocks of {1 + len(new.further_blocks)} groups, the cache has {len(groups)}"
    size, computed = info.block_size, new.computed_tokens
    for group, (first, blocks) in enumerate(new.further_blocks, 1):
        if problem := blocks_problem(groups, group, blocks):
            return problem
        if groups[group].is_state:
            if (first, len(blocks)) != (0, 2 if computed else 1):
                return "it has its own state, and the one it continues from if computed_tokens is not 0"
        elif first > groups[group].first_block(computed, size) or (first + len(blocks)) * size < computed:
            return f"a KV block of group {group} is missing that the token after computed_tokens needs"
    return None


def allocation_problem(
    groups: Groups, sequence: Sequence, group: int, numbers: tuple[int, ...], block_size: int
) -> str | None:
    """Return the problem of blocks added to `sequence`: of a group of states, a position and a block."""
    if group >= len(groups) or not groups[group].is_state:
        return blocks_problem(groups, group, numbers)
    if len(numbers) != 2:
        return "an added state needs a position and a block"
    first = max([sequence.computed + sequence.chunk, *(position + 1 for position, _ in sequence.states_ahead[-1:])])
    if not first <= numbers[0] < sequence.prompt_length or numbers[0] % block_size:
        return (
            f"position {numbers[0]} of an added state is not a multiple of {block_size} between {first}, what is ordered, "
            f"and {sequence.prompt_length}, the end of the prompt"
        )
    return blocks_problem(groups, group, numbers[1:])


def blocks_problem(groups: Groups, group: int, blocks: tuple[int, ...]) -> str | None:
    if group >= len(groups):
        return f"there is no group {group} of KV blocks"
    num_blocks = groups[group].num_blocks
    if blocks and not 0 <= min(blocks) <= max(blocks) < num_blocks:
        return f"a KV block is not one of {num_blocks}"
    return None


def chunk_problem(sequence: Sequence, tokens: int, block_size: int) -> str | None:
    end = sequence.computed + sequence.chunk + tokens
    if tokens < 1 or end > sequence.prompt_length:
        return f"a chunk of {tokens} does not fit the {sequence.prompt_length - sequence.computed} prompt tokens left"
    if end > min(map(len, sequence.tables)) * block_size:
        return "a chunk runs past the allocated blocks"
    return None
