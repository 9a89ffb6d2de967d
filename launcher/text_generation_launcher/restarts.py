"""When a shard that died is started again, and when that is hopeless. Pure: deaths in, seconds to wait out.

A row is a shard's deaths without a good stretch of serving between them. The first restart comes at once, or nearly: most
deaths are accidents. The further ones wait longer and longer, so that a shard that cannot live does not keep the machine
busy. After `max_restarts` restarts in a row there is no reason to expect anything of another one. It is still tried, at
the longest interval, for as long as another replica serves: that costs nobody anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from text_generation_proto.process import ExitCode

DELAYS = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds from the first, second, … death in a row to the restart; the last one for all that follow."""
PROVEN_AFTER = 2.0
"""Seconds of serving after which a death is the first of a new row: it was no fault of how it starts. What kills a shard
while it serves is for the router to deal with, which gives up a request that takes one shard after another with it."""


@dataclass(frozen=True, slots=True)
class Row:
    """The deaths in a row of one shard."""

    deaths: int = 0
    refused: bool = False
    """Whether the last one was its own word that the settings make no sense: no restart changes that."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often a shard is restarted, and how soon."""

    max_restarts: int = 5
    """In a row; 0: a shard is never restarted."""
    delays: tuple[float, ...] = DELAYS
    proven_after: float = PROVEN_AFTER

    def after_death(self, row: Row, served: float, exit_code: int) -> Row:
        """The row once the shard has died with this exit code, `served` seconds after it began to serve (0: never)."""
        deaths = 1 if served >= self.proven_after else row.deaths + 1
        return Row(deaths, refused=exit_code == ExitCode.USAGE)

    def delay(self, row: Row) -> float | None:
        """Seconds from the last death in this row to the next start; None: never."""
        if self.max_restarts == 0:
            return None
        if self.hopeless(row):
            return self.delays[-1]
        return self.delays[min(row.deaths, len(self.delays)) - 1]

    def hopeless(self, row: Row) -> bool:
        """Whether the restarts in this row are used up."""
        return row.refused or row.deaths > self.max_restarts
