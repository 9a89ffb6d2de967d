"""What a step's outcome changed in a batch, beside what is delivered to clients."""

from __future__ import annotations

from dataclasses import dataclass, field

from text_generation_router.scheduling.entry import Entry


@dataclass(slots=True)
class Applied:
    """For the scheduler to draw its conclusions from."""

    served: int = 0
    """Tokens computed for entries that go on or finished: prompt and new."""
    finished: list[Entry] = field(default_factory=list)
    """Entries that came to their own end."""
    dropped: list[Entry] = field(default_factory=list)
    """Entries that are gone for another reason: cancelled, expired, failed."""
    returning: list[Entry] = field(default_factory=list)
    """Entries that go back to the queue."""
