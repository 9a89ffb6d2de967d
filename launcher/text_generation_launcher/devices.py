"""The accelerators of this machine, from the environment and NVML. Loads no model runtime."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from text_generation_shard.gpus import NO_GPU, Gpu, GpusUnreadable, driver_version, read_gpus, visible_gpus

NVML_TIMEOUT = 30.0
"""Seconds; the first call after boot initialises the driver."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Devices:
    """The accelerators that this process may use; assumed to be of one type."""

    count: int
    name: str | None
    """The driver's name for them; None: unknown."""
    gpus: tuple[Gpu, ...] = ()
    """All GPUs of the machine, if NVML can be read."""
    visible: tuple[Gpu, ...] = ()
    """The GPUs and slices that CUDA_VISIBLE_DEVICES names."""
    driver: str | None = None
    """The version of the driver, and of CUDA that it serves."""


async def find_devices(environ: Mapping[str, str]) -> Devices:
    """Return the visible accelerators."""
    visible = count_visible(environ)
    if visible == 0:
        return Devices(0, None)
    try:
        gpus, driver = await _read_in_time()
    except GpusUnreadable as error:
        log.info("GPUs are not read", reason=str(error))
        return Devices(_device_files() if visible is None else visible, None)
    usable = visible_gpus(gpus, environ.get("CUDA_VISIBLE_DEVICES"))
    count = len(usable) if visible is None else visible
    first = next(iter(usable or gpus), None)
    return Devices(count, None if first is None else first.name, gpus, usable, driver)


def _device_files() -> int:
    """Return the number of GPUs by their device files, which also drivers without a readable NVML have."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


async def _read_in_time() -> tuple[tuple[Gpu, ...], str]:
    """Return all GPUs, and the driver's version. Raises GpusUnreadable, also if the driver does not answer."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[tuple[tuple[Gpu, ...], str] | GpusUnreadable] = loop.create_future()

    def settle(result: tuple[tuple[Gpu, ...], str] | GpusUnreadable) -> None:
        if not answer.done():
            answer.set_result(result)

    def read() -> None:
        result: tuple[tuple[Gpu, ...], str] | GpusUnreadable
        try:
            result = read_gpus(), driver_version()
        except GpusUnreadable as error:
            result = error
        with suppress(RuntimeError):  # the loop is closed: the launcher has ended meanwhile
            loop.call_soon_threadsafe(settle, result)

    # A daemon: the launcher must be able to end although the driver hangs.
    threading.Thread(target=read, name="gpus", daemon=True).start()
    try:
        found = await asyncio.wait_for(answer, NVML_TIMEOUT)
    except TimeoutError:
        found = GpusUnreadable(f"the NVIDIA driver did not answer within {NVML_TIMEOUT:.0f} seconds")
    if isinstance(found, GpusUnreadable):
        raise found
    return found


def count_visible(environ: Mapping[str, str]) -> int | None:
    """Return the number of devices that the environment allows; None if it sets no limit."""
    for variable in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        value = environ.get(variable)
        if value is None or (variable == "NVIDIA_VISIBLE_DEVICES" and value in ("all", "void")):
            continue
        devices = [device.strip() for device in value.split(",")]
        return next((i for i, device in enumerate(devices) if device in NO_GPU), len(devices))
    return None


def nth_visible(environ: Mapping[str, str], n: int) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES for only the n-th (from 0) visible device."""
    value = environ.get("CUDA_VISIBLE_DEVICES")
    # NVIDIA_VISIBLE_DEVICES belongs to the container runtime; inside, devices are numbered from 0 again.
    return str(n) if value is None else value.split(",")[n].strip()
