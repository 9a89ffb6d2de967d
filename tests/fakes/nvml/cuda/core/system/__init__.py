"""The stand-in for cuda.core.system 1.2, on the machine that the JSON file NVML_STANDIN describes.

    {"driver": [580, 95, 5], "cuda": [13, 0],
     "gpus": [{"uuid": …, "name": …, "memory": …, "numa": [0], "cpus": [0, 1], "slices": [{"uuid": …, …}], …}],
     "events": [{"gpu": 0, "xid": 79}, {"gpu": 0, "type": "double_bit_ecc_error"}, {"gpu": 0, "lost": true}]}

The file is read again for each value: a test changes it to inject an event. A value that is missing is not supported.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cuda.core.system import typing

__all__ = ["Device", "get_kernel_mode_driver_version", "get_user_mode_driver_version", "typing"]


class NvmlError(Exception):
    pass


class NotSupportedError(NvmlError):
    pass


class NotFoundError(NvmlError):
    pass


class TimeoutError(NvmlError):
    pass


class GpuIsLostError(NvmlError):
    pass


_FILE = Path(os.environ["NVML_STANDIN"])


def _machine() -> dict[str, Any]:
    machine: dict[str, Any] = json.loads(_FILE.read_text())
    return machine


def get_kernel_mode_driver_version() -> tuple[int, ...]:
    return tuple(_machine()["driver"])


def get_user_mode_driver_version() -> tuple[int, ...]:
    return tuple(_machine()["cuda"])


class _Memory:
    def __init__(self, total: int, used: int) -> None:
        self.total, self.used = total, used


class _Utilization:
    def __init__(self, gpu: int) -> None:
        self.gpu = gpu


class _Temperature:
    def __init__(self, celsius: int) -> None:
        self._celsius = celsius

    def get_sensor(self) -> int:
        return self._celsius


class _FieldValue:
    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read

    @property
    def value(self) -> int:
        return int(self._read())


class _MigInfo:
    def __init__(self, device: Device) -> None:
        self._device = device

    @property
    def mode(self) -> bool:
        return self._device._value("slices") is not None

    def get_all_devices(self) -> Iterator[Device]:
        for part in self._device._value("slices"):
            yield Device(uuid=part["uuid"])


class EventData:
    def __init__(self, event: dict[str, Any]) -> None:
        self._event = event

    @property
    def event_type(self) -> typing.EventType:
        return typing.EventType(self._event.get("type", "xid_critical_error"))

    @property
    def event_data(self) -> int:
        if "xid" not in self._event:
            raise ValueError("event_data is only available for Xid critical error events.")
        return int(self._event["xid"])


class DeviceEvents:
    def __init__(self, device: Device, events: list[str]) -> None:
        self._index, self._kinds = device.index, events
        self._seen = len(_machine().get("events", []))

    def wait(self, timeout_ms: int = 0) -> EventData:
        deadline = time.monotonic() + timeout_ms / 1000
        while True:
            for event in _machine().get("events", [])[self._seen :]:
                self._seen += 1
                if event["gpu"] == self._index and event.get("type", "xid_critical_error") in self._kinds:
                    if event.get("lost"):
                        raise GpuIsLostError("GPU is lost")
                    return EventData(event)
            if time.monotonic() >= deadline:
                raise TimeoutError("Timeout")
            time.sleep(min(0.02, max(0.0, deadline - time.monotonic())))


class Device:
    def __init__(self, *, index: int | None = None, uuid: str | None = None) -> None:
        for number, gpu in enumerate(_machine()["gpus"]):
            if index == number or gpu["uuid"] == uuid:
                self._path: tuple[Any, ...] = (number,)
                return
            for part, each in enumerate(gpu.get("slices") or ()):
                if each["uuid"] == uuid:
                    self._path = (number, "slices", part)
                    return
        raise NotFoundError("Not Found")

    def _value(self, name: str) -> Any:  # noqa: ANN401 - JSON
        found = _machine()["gpus"]
        for step in self._path:
            found = found[step]
        if name not in found:
            raise NotSupportedError("Not Supported")
        return found[name]

    @classmethod
    def get_all_devices(cls) -> Iterator[Device]:
        for index in range(len(_machine()["gpus"])):
            yield cls(index=index)

    @property
    def index(self) -> int:
        return int(self._path[0])

    @property
    def uuid(self) -> str:
        return str(self._value("uuid"))

    @property
    def name(self) -> str:
        return str(self._value("name"))

    @property
    def cuda_compute_capability(self) -> tuple[int, int]:
        major, minor = self._value("capability")
        return major, minor

    @property
    def memory_info(self) -> _Memory:
        return _Memory(self._value("memory"), self._value("used"))

    @property
    def utilization(self) -> _Utilization:
        return _Utilization(self._value("utilization"))

    @property
    def temperature(self) -> _Temperature:
        return _Temperature(self._value("temperature"))

    @property
    def current_clock_event_reasons(self) -> list[typing.ClocksEventReasons]:
        return [typing.ClocksEventReasons(reason) for reason in self._value("reasons")]

    @property
    def mig(self) -> _MigInfo:
        return _MigInfo(self)

    def get_memory_affinity(self, scope: str = "node") -> list[int]:
        return list(self._value("numa"))

    def get_cpu_affinity(self, scope: str = "node") -> list[int]:
        return list(self._value("cpus"))

    def get_field_values(self, field_ids: list[int]) -> list[_FieldValue]:
        return [_FieldValue(lambda field=field: self._value(f"field_{int(field)}")) for field in field_ids]

    def get_supported_event_types(self) -> list[typing.EventType]:
        return [typing.EventType(kind) for kind in self._value("event_types")]

    def register_events(self, events: list[str]) -> DeviceEvents:
        return DeviceEvents(self, events)
