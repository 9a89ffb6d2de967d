"""Responses whose bytes wait for a client that reads slowly."""

from __future__ import annotations

from typing import Protocol


class Unread(Protocol):
    """A response that holds bytes for a congested connection."""

    @property
    def unread(self) -> int:
        """Bytes held."""
        ...

    def on_congested(self) -> None:
        """The connection accepts no more for now."""
        ...

    def on_writable(self) -> None:
        """The connection accepts more."""
        ...
