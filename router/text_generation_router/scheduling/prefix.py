"""How far two prompts are alike, and which begin alike."""

from __future__ import annotations

from collections.abc import Collection

from text_generation_router.request import RequestId
from text_generation_router.scheduling.entry import TOKEN_BYTES, Entry

WORTH_WAITING_FOR = 64
"""Tokens being computed for another entry for which one waits; fewer are computed again."""
_BEGINNING = WORTH_WAITING_FOR * TOKEN_BYTES


class Beginnings:
    """Entries by the first WORTH_WAITING_FOR tokens of their prompts, so that one asks those few that may matter.

    Shorter prompts are not kept: to share less is to share nothing.
    """

    def __init__(self) -> None:
        self._alike: dict[tuple[str, bytes], dict[RequestId, Entry]] = {}

    def add(self, entry: Entry) -> None:
        """Keep `entry`, which is not here."""
        if len(entry.prompt_key) >= _BEGINNING:
            self._alike.setdefault(_beginning(entry), {})[entry.request.id] = entry

    def remove(self, entry: Entry) -> None:
        """Let go of `entry`, which was added."""
        beginning = _beginning(entry)
        if (alike := self._alike.get(beginning)) is not None:
            del alike[entry.request.id]
            if not alike:
                del self._alike[beginning]

    def alike(self, entry: Entry) -> Collection[Entry]:
        """Those that begin as `entry` does, in the order in which they were added."""
        return self._alike.get(_beginning(entry), {}).values()

    def __len__(self) -> int:
        """Beginnings there are."""
        return len(self._alike)


def _beginning(entry: Entry) -> tuple[str, bytes]:
    return entry.salt, entry.prompt_key[:_BEGINNING]


def shared_tokens(one: bytes, other: bytes, block_size: int) -> int:
    """Leading tokens that two keys have in common, in whole blocks."""
    step = block_size * TOKEN_BYTES
    blocks = min(len(one), len(other)) // step
    if blocks == 0 or one[:step] != other[:step]:
        return 0
    alike, unlike = 1, blocks + 1  # so many blocks are alike; so many are not, or are not there
    while unlike - alike > 1:
        middle = (alike + unlike) // 2
        if one[alike * step : middle * step] == other[alike * step : middle * step]:
            alike = middle
        else:
            unlike = middle
    return alike * block_size
