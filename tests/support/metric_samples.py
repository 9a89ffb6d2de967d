"""Reading of metrics in tests."""

from __future__ import annotations

from text_generation_router.metrics.instruments import Registry


def samples(registry: Registry) -> dict[str, float]:
    """Value of each series, by its name with labels."""
    lines = (line.rsplit(" ", 1) for line in registry.exposition().decode().splitlines() if line[0] != "#")
    return {name: float(value) for name, value in lines}
