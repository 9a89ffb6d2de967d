"""The stand-in for cuda.pathfinder: the driver's libraries are found while NVML_STANDIN names a file."""

from __future__ import annotations

import os


class DynamicLibNotFoundError(RuntimeError):
    """Raised for a library that is not found."""


def load_nvidia_dynamic_lib(libname: str) -> None:
    if libname != "nvml" or "NVML_STANDIN" not in os.environ:
        raise DynamicLibNotFoundError(f'"{libname}" is an NVIDIA driver library')
