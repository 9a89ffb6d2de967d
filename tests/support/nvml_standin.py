"""Machines with GPUs for the stand-in of cuda.core.system, in this process or in others."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FAKES = Path(__file__).parents[1] / "fakes" / "nvml"
GIB = 1 << 30
EVENT_TYPES = ("xid_critical_error", "double_bit_ecc_error", "single_bit_ecc_error")


def gpu(number: int, *, cpus: Sequence[int] = (), **changes: object) -> dict[str, object]:
    """Return a GPU of a machine."""
    return {
        "uuid": f"GPU-{number}000",
        "name": "NVIDIA H200",
        "memory": 141 * GIB,
        "used": 10 * GIB,
        "capability": [9, 0],
        "numa": [number],
        "cpus": list(cpus),
        "slices": None,
        "utilization": 40,
        "temperature": 33,
        "reasons": ["sw_power_cap"],
        "field_186": 700_500,
        "field_3": 2,
        "field_4": 0,
        "field_230": 0,
        "event_types": list(EVENT_TYPES),
        **changes,
    }


class Machine:
    """The file that describes a machine."""

    def __init__(self, path: Path, gpus: Sequence[dict[str, object]]) -> None:
        self._path = path
        self._content: dict[str, Any] = {"driver": [580, 95, 5], "cuda": [13, 0], "gpus": list(gpus), "events": []}
        self._write()

    @property
    def environ(self) -> dict[str, str]:
        """The variables for a process on this machine; PYTHONPATH is to be joined with others."""
        return {"NVML_STANDIN": str(self._path), "PYTHONPATH": str(FAKES)}

    def event(self, gpu: int, **event: object) -> None:
        """Inject an event: xid=79, type="double_bit_ecc_error" or lost=True."""
        self._content["events"].append({"gpu": gpu, **event})
        self._write()

    def change(self, gpu: int, **values: object) -> None:
        """Change values of a GPU."""
        self._content["gpus"][gpu].update(values)
        self._write()

    def _write(self) -> None:
        whole = self._path.with_suffix(".new")
        whole.write_text(json.dumps(self._content))
        os.replace(whole, self._path)


@contextmanager
def importable(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the stand-in importable in this process, in place of the package."""
    monkeypatch.setenv("NVML_STANDIN", machine.environ["NVML_STANDIN"])
    monkeypatch.syspath_prepend(str(FAKES))
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "cuda"}
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "cuda"]:
            del sys.modules[name]
        sys.modules.update(kept)
