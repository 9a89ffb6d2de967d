"""Which accelerators this machine offers. Asks the environment and nvidia-smi, and so loads no model runtime."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

NVIDIA_SMI_TIMEOUT = 30.0
"""Seconds; the first call after boot initialises the driver."""

_LISTED = re.compile(r"^GPU \d+: (?P<name>.+?) \(UUID: .+\)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Devices:
    """The accelerators this process may use; all are taken to be of one kind."""

    count: int
    name: str | None
    """As the driver spells it, where that could be asked."""


async def find_devices(environ: Mapping[str, str]) -> Devices:
    """The visible accelerators."""
    visible = count_visible(environ)
    if visible == 0:
        return Devices(0, None)
    names = parse_listing(await _nvidia_smi())
    count = len(names) if visible is None else visible
    return Devices(count, names[0] if names else None)


def count_visible(environ: Mapping[str, str]) -> int | None:
    """How many devices the environment allows; None: it does not say."""
    for variable in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        value = environ.get(variable)
        if value is None or (variable == "NVIDIA_VISIBLE_DEVICES" and value in ("all", "void")):
            continue
        devices = [device.strip() for device in value.split(",")]
        # CUDA reads the list up to the first device that there is not; "" , "-1" and "none" are the usual ways to say none.
        bad = next((i for i, device in enumerate(devices) if device in ("", "-1", "none", "NoDevFiles")), len(devices))
        return bad
    return None


def nth_visible(environ: Mapping[str, str], n: int) -> str:
    """How CUDA_VISIBLE_DEVICES names the n-th (from 0) of the visible devices alone."""
    value = environ.get("CUDA_VISIBLE_DEVICES")
    # NVIDIA_VISIBLE_DEVICES is the container runtime's: what it lets in is numbered anew, from 0.
    return str(n) if value is None else value.split(",")[n].strip()


def parse_listing(listing: str) -> tuple[str, ...]:
    """The names in the output of `nvidia-smi -L`; a GPU cut in MIG slices counts once."""
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
