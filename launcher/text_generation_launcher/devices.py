"""The accelerators of this machine, from the environment and nvidia-smi. Loads no model runtime."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

NVIDIA_SMI_TIMEOUT = 30.0
"""Seconds; the first call after boot initialises the driver."""

_LISTED = re.compile(r"^GPU \d+: (?P<name>.+?) \(UUID: .+\)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Devices:
    """The accelerators that this process may use; assumed to be of one type."""

    count: int
    name: str | None
    """The driver's name for them; None: unknown."""


async def find_devices(environ: Mapping[str, str]) -> Devices:
    """Return the visible accelerators."""
    visible = count_visible(environ)
    if visible == 0:
        return Devices(0, None)
    names = parse_listing(await _nvidia_smi())
    count = len(names) if visible is None else visible
    return Devices(count, names[0] if names else None)


def count_visible(environ: Mapping[str, str]) -> int | None:
    """Return the number of devices that the environment allows; None if it sets no limit."""
    for variable in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        value = environ.get(variable)
        if value is None or (variable == "NVIDIA_VISIBLE_DEVICES" and value in ("all", "void")):
            continue
        devices = [device.strip() for device in value.split(",")]
        # CUDA reads the list up to the first invalid device; "", "-1" and "none" usually mean no device.
        invalid = ("", "-1", "none", "NoDevFiles")
        return next((i for i, device in enumerate(devices) if device in invalid), len(devices))
    return None


def nth_visible(environ: Mapping[str, str], n: int) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES for only the n-th (from 0) visible device."""
    value = environ.get("CUDA_VISIBLE_DEVICES")
    # NVIDIA_VISIBLE_DEVICES belongs to the container runtime; inside, devices are numbered from 0 again.
    return str(n) if value is None else value.split(",")[n].strip()


def parse_listing(listing: str) -> tuple[str, ...]:
    """Return the device names in the output of `nvidia-smi -L`; a GPU with MIG slices counts once."""
    return tuple(match["name"] for match in _LISTED.finditer(listing))


async def _nvidia_smi() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    process = await asyncio.create_subprocess_exec(
        program,
        "-L",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        stdin=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(NVIDIA_SMI_TIMEOUT):
            output, _ = await process.communicate()
    except TimeoutError:
        return ""
    finally:
        if process.returncode is None:
            process.kill()
    return output.decode(errors="replace") if process.returncode == 0 else ""


_PACKAGES = ("text-generation-trtllm", "torch", "tensorrt-llm", "transformers", "tokenizers", "grpcio", "aiohttp")


def describe_environment(devices: Devices) -> dict[str, object]:
    """Return platform, devices and package versions as fields of a log record (--env)."""
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
