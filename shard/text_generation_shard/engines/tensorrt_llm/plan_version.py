"""The version of TensorRT that built an engine file (a plan), from its first bytes: its API cannot read them without loading.

The layout is that of `trtexec --getPlanVersionOnly` (samples/common/sampleEngines.cpp in NVIDIA/TensorRT): tag, version of the
layout, four numbers. The GPU that a plan was built for has no known place in it: TensorRT itself refuses another one.
"""

from __future__ import annotations

import struct
from importlib.metadata import distributions
from pathlib import Path

HEADER = struct.Struct("<4sI16x4B")


def plan_problem(file: Path) -> str | None:
    """Return why the installed TensorRT cannot run a plan: another version built it. None if it can, or that is unknown."""
    installed = next(
        (found.version for name in ("tensorrt", "tensorrt-cu13") for found in distributions(name=name)), ""
    )
    with file.open("rb") as plan:
        header = plan.read(HEADER.size).ljust(HEADER.size)
    tag, layout, *built = HEADER.unpack(header)
    numbers = [int(part) for part in installed.split(".")[: len(built)] if part.isdecimal()]
    if (tag, layout) != (b"ftrt", 0) or built[: len(numbers)] == numbers:
        return None
    return f"TensorRT {'.'.join(map(str, built))} built it, and {installed} is installed, which cannot run it"
