"""The stand-in for cuda.core.system against the real package, which is installed in a folder of its own.

In the environment of the tests it would slow every import of torch and every start of a launcher down.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from enum import Enum
from pathlib import Path

import pytest
from nvml_standin import Machine, gpu, importable

PACKAGES = ("cuda-core==1.2.2", "cuda-bindings==13.5.0", "cuda-pathfinder==1.9.0")
NAMES = ("get_kernel_mode_driver_version", "get_user_mode_driver_version")
NAMES += ("NvmlError", "NotSupportedError", "NotFoundError", "TimeoutError", "GpuIsLostError")
CLASSES = {"Device": "Device", "EventData": "EventData", "DeviceEvents": "DeviceEvents", "_MigInfo": "MigInfo"}
CLASSES |= {
    "_Memory": "MemoryInfo",
    "_Utilization": "Utilization",
    "_Temperature": "Temperature",
    "_FieldValue": "FieldValue",
}
"""The stand-in's classes, and the real ones."""
ENUMS = ("EventType", "ClocksEventReasons", "FieldId")

REAL = """
    import json, re, sys
    from cuda.core import system
    from cuda.core.system import _device
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    def parameters(member):
        # Those of compiled methods are in the first line of their documentation.
        return re.findall(r"(\\w+)\\s*:", (member.__doc__ or "").partition("\\n")[0]) if callable(member) else None

    classes, enums = json.loads(sys.argv[1]), json.loads(sys.argv[2])
    json.dump({
        "names": [name for name in dir(system) if not name.startswith("_")],
        "errors": [name for name in dir(system) if name.endswith("Error") and issubclass(getattr(system, name), system.NvmlError)],
        "classes": {
            name: {member: parameters(getattr(getattr(_device, name), member)) for member in dir(getattr(_device, name))}
            for name in classes
        },
        "enums": {
            name: {each: getattr(getattr(system.typing, name), each) for each in dir(getattr(system.typing, name)) if each.isupper()}
            for name in enums
        },
    }, sys.stdout, default=str)
"""


@pytest.mark.full
def test_the_stand_in_has_names_of_the_real_package_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tmp_path / "packages")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--target",
        folder,
    ]
    subprocess.run([*pip, *PACKAGES], check=True)
    arguments = (json.dumps(list(CLASSES.values())), json.dumps(ENUMS))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(REAL), *arguments],
        env=os.environ | {"PYTHONPATH": folder},
        check=True,
        stdout=subprocess.PIPE,
    )
    real = json.loads(done.stdout)
    with importable(Machine(tmp_path / "machine", [gpu(0)]), monkeypatch):
        made = importlib.import_module("cuda.core.system")
        assert set(NAMES) <= set(real["names"])
        assert {name for name in NAMES if name.endswith("Error")} <= set(real["errors"])
        for ours, theirs in CLASSES.items():
            one = getattr(made, ours)
            for name in (name for name in vars(one) if not name.startswith("_")):
                assert name in real["classes"][theirs], f"{theirs}.{name}"
                found, member = real["classes"][theirs][name], getattr(one, name)
                assert (found is not None) == callable(member), f"{theirs}.{name}"
                if found is not None:
                    assert parameters(member) <= set(found), f"{theirs}.{name}"
        for name in ENUMS:
            values: type[Enum] = getattr(made.typing, name)
            for each in values:
                assert real["enums"][name][each.name] == each.value


def parameters(method: Callable[..., object]) -> set[str]:
    return set(inspect.signature(method).parameters) - {"self"}
