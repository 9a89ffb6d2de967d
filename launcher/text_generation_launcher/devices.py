"""The accelerators of this machine, from the environment and NVML. Loads no model runtime."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from text_generation_common.log import log
from text_generation_shard.gpus import NO_GPU, Gpu, GpusUnreadable, driver_version, read_gpus, visible_gpus

NVML_TIMEOUT = 30.0
"""Seconds; the first call after boot initialises the driver."""


T = TypeVar("T")


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
        gpus, driver = await call_in_daemon(lambda: (read_gpus(), driver_version()), NVML_TIMEOUT)
    except (GpusUnreadable, TimeoutError) as error:
        reason = str(error) or f"the NVIDIA driver did not answer within {NVML_TIMEOUT:.0f} seconds"
        log.info("GPUs are not read", reason=reason)
        return Devices(_device_files() if visible is None else visible, None)
    usable = visible_gpus(gpus, environ.get("CUDA_VISIBLE_DEVICES"))
    count = len(usable) if visible is None else visible
    first = next(iter(usable or gpus), None)
    return Devices(count, None if first is None else first.name, gpus, usable, driver)


async def call_in_daemon(function: Callable[[], T], seconds: float) -> T:
    """Return what `function` returns, or raise its error; TimeoutError after `seconds`.

    It runs in a daemon thread: the process can end although the call of a library never does.
    """
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()

    def call() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised in the caller
            answer.set_exception(error)

    threading.Thread(target=call, name=function.__name__, daemon=True).start()
    async with asyncio.timeout(seconds):
        return await asyncio.wrap_future(answer)


def _device_files() -> int:
    """Return the number of GPUs by their device files, which also drivers without a readable NVML have."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def count_visible(environ: Mapping[str, str]) -> int | None:
    """Return the number of devices that the environment allows; None if it sets no limit."""
    for variable in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        value = environ.get(variable)
        if value is None or (variable == "NVIDIA_VISIBLE_DEVICES" and value in ("all", "void")):
            continue
        devices = [device.strip() for device in value.split(",")]
        return next((i for i, device in enumerate(devices) if device in NO_GPU), len(devices))
    return None


def some_visible(environ: Mapping[str, str], first: int, count: int = 1) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES for `count` visible devices from number `first` (from 0) on only."""
    value = environ.get("CUDA_VISIBLE_DEVICES")
    # NVIDIA_VISIBLE_DEVICES belongs to the container runtime; inside, devices are numbered from 0 again.
    names = list(map(str, range(first + count))) if value is None else [name.strip() for name in value.split(",")]
    return ",".join(names[first : first + count])
