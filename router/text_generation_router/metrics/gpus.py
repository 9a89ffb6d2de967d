"""Metrics of the GPUs, from the states that the shards' reports bring."""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.metrics.instruments import head_text

THROTTLE_REASONS = (
    *("sw_power_cap", "hw_slowdown", "sync_boost", "sw_thermal_slowdown", "hw_thermal_slowdown"),
    *("hw_power_brake_slowdown", "board_limit", "reliability"),
)
"""NVML's names for the causes of lower clocks, without those that a load or a setting asks for."""

MAX_GPUS = 64
"""Most GPUs of a replica that are shown."""

_UUID = re.compile(r"[\w./-]{1,96}")
_Samples = Callable[[pb.GpuState], Iterator[tuple[str, float]]]


def _plain(field: str) -> _Samples:
    def samples(state: pb.GpuState) -> Iterator[tuple[str, float]]:
        if state.HasField(field):  # type: ignore[arg-type]
            yield "", getattr(state, field)

    return samples


def _throttled(state: pb.GpuState) -> Iterator[tuple[str, float]]:
    for reason in THROTTLE_REASONS:
        yield f',reason="{reason}"', reason in state.throttle_reasons


def _ecc(state: pb.GpuState) -> Iterator[tuple[str, float]]:
    for kind in ("corrected", "uncorrected"):
        if state.HasField(f"{kind}_ecc_errors"):  # type: ignore[arg-type]
            yield f',kind="{kind}"', getattr(state, f"{kind}_ecc_errors")


_FAMILIES: list[tuple[str, str, str, _Samples]] = [
    ("memory_used_bytes", "gauge", "Memory of the GPU in use, by any process", _plain("memory_used_bytes")),
    ("memory_total_bytes", "gauge", "Memory of the GPU", _plain("memory_total_bytes")),
    (
        "utilization_ratio",
        "gauge",
        "Share of the last sample period in which a kernel ran, 0 to 1",
        _plain("utilization"),
    ),
    ("power_watts", "gauge", "Power that the GPU draws", _plain("power_watts")),
    ("temperature_celsius", "gauge", "Temperature of the GPU", _plain("temperature_celsius")),
    ("throttled", "gauge", "1 while the clocks of the GPU are lowered for this reason, else 0", _throttled),
    ("ecc_errors_total", "counter", "ECC errors of the GPU since its driver was loaded, by kind", _ecc),
]


class GpuMetrics:
    """The last states of the GPUs of each replica; an Instrument. A replica without a session has none."""

    def __init__(self) -> None:
        self._states: dict[int, list[tuple[str, pb.GpuState]]] = {}
        """By replica: the labels of each GPU, and its state."""

    def update(self, replica: int, states: Iterable[pb.GpuState]) -> None:
        self._states[replica] = [
            (f'replica="{replica}",gpu="{state.index}",uuid="{state.uuid}"', state)
            for state in islice(states, MAX_GPUS)
            if _UUID.fullmatch(state.uuid)
        ]

    def states(self, replica: int) -> list[pb.GpuState]:
        return [state for _, state in self._states.get(replica, ())]

    def remove(self, replica: int) -> None:
        self._states.pop(replica, None)

    def text(self) -> str:
        return "".join(
            head_text(name := f"text_generation_gpu_{suffix}", documentation, kind)
            + "".join(self._lines(name, samples))
            for suffix, kind, documentation, samples in _FAMILIES
        )

    def _lines(self, name: str, samples: _Samples) -> Iterator[str]:
        for states in self._states.values():
            for labels, state in states:
                for label, value in samples(state):
                    yield f"{name}{{{labels}{label}}} {float(value)!r}\n"
