"""A stand-in for Triton's driver, and a plugin of pytest: kernels are compiled for Hopper and not run, which needs no GPU.

COMPILE_LOG names a file with a line for each kernel that does not compile or needs more shared memory than there is.
"""

from __future__ import annotations

import os
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

SHARED_MEMORY = 232448
"""Bytes that a program may have."""

compiled: dict[str, list[str]] = {}
"""PTX by the name of a kernel, in the order of the launches."""


class HopperDriver:
    """As much of a driver as a launch asks before it runs a kernel."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


knobs.runtime.interpret = False  # whatever the fixtures of the tests say
driver.set_active(HopperDriver())
_run = JITFunction.run


def _compile(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:  # noqa: ANN401
    name = self.fn.__name__
    try:
        kernel = _run(self, *args, grid=grid, warmup=True, **options)
    except Exception as error:  # noqa: BLE001 – of the compiler
        _log(f"{name}: {error}")
        return None
    if kernel.metadata.shared > SHARED_MEMORY:
        _log(f"{name}: {kernel.metadata.shared} bytes of shared memory")
    compiled.setdefault(name, []).append(kernel.asm["ptx"])
    return kernel


def _log(line: str) -> None:
    with open(os.environ["COMPILE_LOG"], "a") as file:
        file.write(f"{line} ({os.environ.get('PYTEST_CURRENT_TEST')})\n")


JITFunction.run = _compile
