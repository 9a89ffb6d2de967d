"""The state of a replica's GPUs, once a second, and their faults, from a thread of its own.

    NVML ──► thread ──► event loop ──► the next report, and from it the router's metrics
                └─ a fault ──────────► the shard ends; its router moves the sequences, the launcher restarts it

A fault is an event after which NVIDIA's catalogue of Xids (docs.nvidia.com/deploy/xid-errors, for Ampere and newer GPUs) asks
for a reset of the GPU, a reboot, or, after a memory error, a restart of the program. Errors that programs cause (13, 31, 43,
45, …), and those that the catalogue ignores (63, 92, 93, …), are logged and nothing else.
"""

import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from text_generation_common.log import log
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_shard.gpus import Gpu, GpusUnreadable, nvml, unreadable

EVERY_S = 1.0
"""Seconds between two readings."""

XID = "xid_critical_error"
FAULTS = {
    "double_bit_ecc_error": "uncorrectable ECC error",
    "dram_retirement_failure": "memory could not be remapped",
    "fatal_poison_error": "poisoned memory was used",
    "gpu_unavailable_error": "the GPU is unavailable",
}
"""Events besides Xids after which the GPU, or its memory, cannot be trusted."""
RECOVERY_CHANGED = 154
"""The Xid that announces what others require: read with DEV_GET_GPU_RECOVERY_ACTION."""
NEEDS_RESET = {1: "the GPU needs a reset", 2: "the machine needs a reboot"}
"""By the value of that field."""
FATAL_XIDS = {
    46: "GPU stopped processing",
    48: "double bit ECC error",
    62: "micro-controller halted",
    64: "memory could not be remapped",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
    109: "context switch timeout",
    110: "security fault",
    119: "GSP RPC timeout",
    120: "GSP error",
    136: "NVLink training failed",
    140: "unrecovered ECC error",
    143: "GPU initialization error",
    151: "key rotation error",
    156: "resource retirement event",
    158: "GPU fatal timeout",
}
"""Xids that end the replica. 155 is not here: the catalogue asks for a reset, but links that sleep cause it, too. 144 to 150
(NVLink 5) are fatal by their details: 154 tells."""


def watch_gpus(
    gpus: Sequence[Gpu], on_states: Callable[[list[pb.GpuState]], None], on_fault: Callable[[str], None]
) -> None:
    """Read GPUs until a fault. A call to a driver that hangs never returns: run it in a thread of its own."""
    try:
        system = nvml()
        watched = [WatchedGpu(system, gpu) for gpu in gpus]
    except GpusUnreadable as error:
        log.info("GPUs are not observed", reason=str(error))
        return
    while True:
        began = time.monotonic()
        on_states([gpu.state() for gpu in watched])
        # The set of events of each GPU collects while those of others are waited for.
        for gpu in watched:
            if fault := gpu.wait((EVERY_S - (time.monotonic() - began)) / len(watched)):
                on_fault(fault)
                return
        time.sleep(max(0.0, EVERY_S - (time.monotonic() - began)))


class WatchedGpu:
    def __init__(self, system: ModuleType, gpu: Gpu) -> None:
        self._system = system
        self._gpu = gpu
        self._errors = unreadable(system)
        self._fields = system.typing.FieldId
        try:
            self._device = system.Device(uuid=gpu.uuid)
            # Power, ECC and events belong to the whole GPU.
            self._whole = system.Device(index=gpu.index)
        except self._errors as error:
            raise GpusUnreadable(f"{gpu.uuid}: {error}") from error
        self._events = self._register()
        self._logged: set[int] = set()
        self._uncorrected: int | None = None

    def _register(self) -> Any:  # noqa: ANN401 - cuda.core.system.DeviceEvents, or None
        try:
            supported = set(map(str, self._whole.get_supported_event_types()))
            return self._whole.register_events([kind for kind in (XID, *FAULTS) if kind in supported])
        except self._errors as error:
            log.info("Xid and ECC events of a GPU are not observed", gpu=self._gpu.index, reason=str(error))
            return None

    def wait(self, seconds: float) -> str | None:
        """Wait for a fault. Return its name, and that of the GPU; None if there was none in time."""
        deadline = time.monotonic() + seconds
        while self._events is not None and (left := deadline - time.monotonic()) > 0:
            try:
                event = self._events.wait(timeout_ms=max(1, int(left * 1000)))
                kind = str(event.event_type)
                fault = self._of_xid(event.event_data) if kind == XID else FAULTS.get(kind)
            except self._system.TimeoutError:
                return None
            except self._system.GpuIsLostError:
                fault = "the GPU is lost"
            except self._errors as error:
                log.warning(
                    "Xid and ECC events of a GPU cannot be read any more", gpu=self._gpu.index, reason=str(error)
                )
                self._events = fault = None
            if fault:
                return self._named(fault)
        return None if self._events is not None else self._more_errors()

    def _of_xid(self, xid: int) -> str | None:
        """Return the fault that an Xid means. Others are logged, each number once."""
        if xid == RECOVERY_CHANGED:
            meaning = NEEDS_RESET.get(self._field(self._fields.DEV_GET_GPU_RECOVERY_ACTION) or 0)
        else:
            meaning = FATAL_XIDS.get(xid)
        if meaning is None and xid not in self._logged:
            self._logged.add(xid)
            log.warning("Xid without a GPU fault", xid=xid, gpu=self._gpu.index, uuid=self._gpu.uuid)
        return f"Xid {xid}, {meaning}" if meaning else None

    def _more_errors(self) -> str | None:
        """Return a fault if the count of uncorrectable ECC errors grew: for drivers without events."""
        before, self._uncorrected = self._uncorrected, self._field(self._fields.DEV_ECC_DBE_VOL_TOTAL)
        if before is None or self._uncorrected is None or self._uncorrected <= before:
            return None
        return self._named(FAULTS["double_bit_ecc_error"])

    def _named(self, fault: str) -> str:
        return f"GPU {self._gpu.index} ({self._gpu.uuid}): {fault}"

    def state(self) -> pb.GpuState:
        """Return the state now. A value that is None is not set."""
        device, whole, fields = self._device, self._whole, self._fields
        memory = self._read(lambda: device.memory_info)
        busy, milliwatts = self._read(lambda: device.utilization.gpu), self._field(fields.DEV_POWER_INSTANT)
        return pb.GpuState(
            index=self._gpu.index,
            uuid=self._gpu.uuid,
            memory_used_bytes=getattr(memory, "used", None),
            memory_total_bytes=getattr(memory, "total", None),
            utilization=None if busy is None else busy / 100,
            power_watts=None if milliwatts is None else milliwatts / 1000,
            temperature_celsius=self._read(lambda: whole.temperature.get_sensor()),
            throttle_reasons=map(str, self._read(lambda: whole.current_clock_event_reasons) or ()),
            corrected_ecc_errors=self._field(fields.DEV_ECC_SBE_VOL_TOTAL),
            uncorrected_ecc_errors=self._field(fields.DEV_ECC_DBE_VOL_TOTAL),
        )

    def _field(self, field: int) -> Any:  # noqa: ANN401 - a number, or None
        return self._read(lambda: self._whole.get_field_values([field])[0].value)

    def _read(self, read: Callable[[], Any]) -> Any:  # noqa: ANN401 - what `read` returns, or None
        try:
            return read()
        except self._errors:  # the driver, or this kind of device, does not tell it
            return None
