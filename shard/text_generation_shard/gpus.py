"""The NVIDIA GPUs of this machine, read through cuda-python (NVML). Makes no CUDA context."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from text_generation_common.cpus import cgroup_folders
from text_generation_common.log import log
from text_generation_common.one_line import typed_line
from text_generation_shard.config import ShardConfig, choose_engine, device_number

NO_GPU = ("", "-1", "none", "NoDevFiles")
"""Entries of CUDA_VISIBLE_DEVICES that end it: CUDA reads the list up to the first invalid device."""


T = TypeVar("T")


class GpusUnreadable(Exception):
    """NVML cannot be used. The message is one line with the cause."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or a MIG slice of one."""

    index: int
    """The number in nvidia-smi; a slice has that of its GPU."""
    uuid: str
    name: str
    memory: int
    """Bytes."""
    compute_capability: str
    """Major and minor version: 9.0."""
    numa_nodes: tuple[int, ...] = ()
    cpus: frozenset[int] = frozenset()
    """The near cores."""
    mig: bool | None = None
    """MIG is on; None: the GPU has none."""
    slices: tuple[Gpu, ...] = ()
    """MIG slices."""


def nvml() -> ModuleType:
    """Return cuda.core.system. Raises GpusUnreadable."""
    try:
        from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

        load_nvidia_dynamic_lib("nvml")  # a machine without a driver does not import the rest
        from cuda.core import system
    except ImportError as error:
        raise GpusUnreadable(f"cuda-python is not installed ({error})") from error
    except DynamicLibNotFoundError as error:
        raise GpusUnreadable("there is no NVIDIA driver") from error
    except Exception as error:  # packages that do not fit each other fail in any way
        raise GpusUnreadable(f"cuda-python cannot be imported ({typed_line(error)})") from error
    if not hasattr(system, "Device"):
        raise GpusUnreadable("cuda-bindings is too old for NVML: 13.1.2 is needed, or 12.9.6 with CUDA 12")
    return system  # type: ignore[no-any-return]


def unreadable(system: ModuleType) -> tuple[type[Exception], ...]:
    """Return the exceptions of a reading that fails: NVML's, its wrapper's for values it does not know, another wrapper's."""
    return (system.NvmlError, RuntimeError, OSError, ValueError, LookupError, AttributeError)


def read_gpus() -> tuple[Gpu, ...]:
    """Return all GPUs, in the order of nvidia-smi. Raises GpusUnreadable."""
    system = nvml()
    try:
        return tuple(_read(system, device) for device in system.Device.get_all_devices())
    except unreadable(system) as error:
        raise GpusUnreadable(f"NVML: {error}") from error


def _read(system: ModuleType, device: Any) -> Gpu:  # noqa: ANN401 - a cuda.core.system.Device
    def optional(read: Callable[[], T], default: T) -> T:
        # Virtual machines, sandboxes and older GPUs lack some of it.
        try:
            return read()
        except unreadable(system):
            return default

    nodes: list[int] = optional(device.get_memory_affinity, [])
    cpus: list[int] = optional(device.get_cpu_affinity, [])
    mig: bool | None = optional(lambda: bool(device.mig.mode), None)
    gpu = Gpu(
        index=device.index,
        uuid=device.uuid,
        name=device.name,
        memory=device.memory_info.total,
        compute_capability="{}.{}".format(*device.cuda_compute_capability),
        numa_nodes=tuple(nodes),
        cpus=frozenset(cpus),
        mig=mig,
    )
    parts = device.mig.get_all_devices() if mig else ()
    slices = (replace(gpu, uuid=each.uuid, name=each.name, memory=each.memory_info.total, mig=None) for each in parts)
    return replace(gpu, slices=tuple(slices))


def driver_version() -> str:
    """Return the version of the driver, and of CUDA that it serves. Raises GpusUnreadable."""
    system = nvml()
    try:
        kernel, cuda = system.get_kernel_mode_driver_version(), system.get_user_mode_driver_version()
    except unreadable(system) as error:
        raise GpusUnreadable(f"NVML: {error}") from error
    first, *others = kernel  # NVIDIA writes 580.95.05
    return f"{'.'.join([str(first), *(f'{each:02}' for each in others)])} (CUDA {'.'.join(map(str, cuda))})"


def visible_gpus(gpus: Sequence[Gpu], names: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs and slices that a value of CUDA_VISIBLE_DEVICES names; None: all.

    A name is an index, a UUID, or the first characters of a UUID. An index is that of nvidia-smi: CUDA's own order differs only on
    machines with GPUs of several types.
    """
    found: list[Gpu] = []
    for name in (str(gpu.index) for gpu in gpus) if names is None else (name.strip() for name in names.split(",")):
        if name in NO_GPU or (gpu := _named(gpus, name)) is None:
            break
        found.append(gpu)
    return tuple(found)


def _named(gpus: Iterable[Gpu], name: str) -> Gpu | None:
    for gpu in gpus:
        if name == str(gpu.index) or gpu.uuid.startswith(name):
            return gpu.slices[0] if gpu.slices else gpu  # CUDA uses one slice of a GPU that has slices
        for part in gpu.slices:
            if part.uuid.startswith(name):
                return part
    return None


def gpus_of_shard(config: ShardConfig, environ: Mapping[str, str]) -> tuple[tuple[Gpu, ...], tuple[Gpu, ...]]:
    """Return the GPUs that a shard uses, and those it observes. Raises GpusUnreadable."""
    engine = choose_engine(config.engine, has_gpu=True)
    if engine == "echo" or config.device == "cpu":
        return (), ()
    gpus = read_gpus()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    own = visible_gpus(gpus, visible)
    if engine == "tensorrt-llm":  # the launcher shows it only its own
        own = own[: config.tensor_parallel] if visible is None else own
    else:
        first = device_number(config.device) or 0
        own = own[first : first + 1]
    return own, visible_gpus(gpus, config.group_gpus) if config.group_gpus else own


def stay_near(gpus: Sequence[Gpu]) -> None:
    """Bind this process to the cores near these GPUs, unless the operator or a service manager chose its cores."""
    allowed = os.sched_getaffinity(0)
    near = frozenset().union(*(gpu.cpus for gpu in gpus)) & allowed
    if not near or near == allowed:
        return
    nodes = sorted({node for gpu in gpus for node in gpu.numa_nodes})
    fields = {"gpus": [gpu.index for gpu in gpus], "numa_nodes": nodes, "near": core_list(near)}
    if not _machine_cores() <= allowed:  # some were chosen for this process
        log.info("cores are kept as they were set", cores=core_list(allowed), **fields)
        return
    try:
        for thread in os.listdir("/proc/self/task"):  # later ones inherit from those that start them
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), near)
    except OSError as error:
        log.info("cores cannot be set", reason=error.strerror, **fields)
        return
    log.info("runs on the cores near its GPU", **fields)


def _machine_cores() -> frozenset[int]:
    """Return the cores of this process's cgroup, or else of the machine."""
    folders = cgroup_folders("cpuset")
    of_cgroups = (folder / name for folder in folders for name in ("cpuset.cpus.effective", "cpuset.effective_cpus"))
    for file in (*of_cgroups, Path("/sys/devices/system/cpu/online")):
        with suppress(OSError, ValueError):
            return frozenset(parse_cores(file.read_text(encoding="ascii")))
    return frozenset(range(os.cpu_count() or 1))


def parse_cores(text: str) -> list[int]:
    """Return the cores of a list as the kernel writes it, such as 0-3,8. Raises ValueError."""
    cores: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def core_list(cores: Iterable[int]) -> str:
    """Return cores as the kernel writes a list of them."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)
