"""The version, where the library keeps it."""

from __future__ import annotations

__version__ = "1.2.1"
