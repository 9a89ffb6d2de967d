"""What --env shows: what one asks for first in a bug report."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from text_generation_launcher.devices import Devices

_PACKAGES = ("text-generation-trtllm", "torch", "tensorrt-llm", "transformers", "tokenizers", "grpcio", "aiohttp")


def describe(devices: Devices) -> dict[str, object]:
    """Platform, devices and versions, as fields of a log record."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "devices": devices.count,
        "device": devices.name,
        **{package: found for package in _PACKAGES if (found := _version(package)) is not None},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
