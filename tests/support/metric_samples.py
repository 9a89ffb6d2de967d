"""Reading of metrics in tests."""

from __future__ import annotations

from text_generation_router.metrics.instruments import Registry


def exposition(registry: Registry) -> str:
    """Every metric in Prometheus' text format."""
    return "".join(registry.texts())


def samples(registry: Registry) -> dict[str, float]:
    """Value of each series, by its name with labels."""
    lines = (line.rsplit(" ", 1) for line in exposition(registry).splitlines() if line[0] != "#")
    return {name: float(value) for name, value in lines}
