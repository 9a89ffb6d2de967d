"""The stand-in for cuda.core.system against the real package."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from enum import Enum
from pathlib import Path

import pytest
from nvml_standin import Machine, gpu, importable

FUNCTIONS = ("get_kernel_mode_driver_version", "get_user_mode_driver_version")
EXCEPTIONS = ("NvmlError", "NotSupportedError", "NotFoundError", "TimeoutError", "GpuIsLostError")
CLASSES = {"Device": "Device", "EventData": "EventData", "DeviceEvents": "DeviceEvents", "_MigInfo": "MigInfo"}
CLASSES |= {
    "_Memory": "MemoryInfo",
    "_Utilization": "Utilization",
    "_Temperature": "Temperature",
    "_FieldValue": "FieldValue",
}
"""The stand-in's classes, and the real ones."""


def parameters(method: Callable[..., object]) -> set[str]:
    """Return the names of parameters; those of compiled methods are in the first line of their documentation."""
    try:
        return set(inspect.signature(method).parameters)
    except ValueError:
        return set(re.findall(r"(\w+)\s*:", (method.__doc__ or "").partition("\n")[0]))


def test_the_stand_in_has_names_of_the_real_package_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.core", reason="cuda-core is in the extra dev")
    real = importlib.import_module("cuda.core.system")
    internal = importlib.import_module("cuda.core.system._device")
    with importable(Machine(tmp_path / "machine", [gpu(0)]), monkeypatch):
        made = importlib.import_module("cuda.core.system")
        for name in FUNCTIONS:
            assert callable(getattr(real, name))
        for name in EXCEPTIONS:
            assert issubclass(getattr(real, name), real.NvmlError)
        for ours, theirs in CLASSES.items():
            one, other = getattr(made, ours), getattr(internal, theirs)
            for name, member in vars(one).items():
                if name.startswith("_"):
                    continue
                assert hasattr(other, name), f"{theirs}.{name}"
                is_method = callable(member) or isinstance(member, classmethod)
                assert callable(getattr(other, name)) == is_method, f"{theirs}.{name}"
                if is_method:
                    wanted = parameters(getattr(one, name)) - {"self"}
                    assert wanted <= parameters(getattr(other, name)), f"{theirs}.{name}"
        for name in ("EventType", "ClocksEventReasons", "FieldId"):
            values: type[Enum] = getattr(made.typing, name)
            for each in values:
                assert getattr(getattr(real.typing, name), each.name) == each.value
