"""Reading, choosing and observing GPUs, with the stand-in for cuda.core.system."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from nvml_standin import GIB, Machine, gpu, importable

from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_shard.config import ShardConfig
from text_generation_shard.gpu_watch import watch_gpus
from text_generation_shard.gpus import (
    Gpu,
    GpusUnreadable,
    core_list,
    driver_version,
    gpus_of_shard,
    nvml,
    parse_cores,
    read_gpus,
    visible_gpus,
)

SLICES = [{"uuid": f"MIG-{n}", "name": "NVIDIA H200 MIG 3g.71gb", "memory": 70 * GIB, "used": 0} for n in (1, 2)]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine(tmp_path / "machine", [gpu(0, cpus=[0, 1]), gpu(1, cpus=[2], slices=SLICES), gpu(2)])
    with importable(made, monkeypatch):
        yield made
    made.event(0, lost=True)  # the watches end


def test_facts_of_gpus_and_slices(machine: Machine) -> None:
    first, second, third = read_gpus()
    assert first == Gpu(0, "GPU-0000", "NVIDIA H200", 141 * GIB, "9.0", (0,), frozenset({0, 1}), mig=False)
    assert [(part.index, part.uuid, part.memory) for part in second.slices] == [
        (1, "MIG-1", 70 * GIB),
        (1, "MIG-2", 70 * GIB),
    ]
    assert (second.mig, second.slices[0].cpus, second.slices[0].compute_capability) == (True, frozenset({2}), "9.0")
    assert third.cpus == frozenset()
    assert driver_version() == "580.95.05 (CUDA 13.0)"


@pytest.mark.parametrize(
    ("names", "uuids"),
    [
        (None, ["GPU-0000", "MIG-1", "GPU-2000"]),
        ("2, 0", ["GPU-2000", "GPU-0000"]),
        ("GPU-2", ["GPU-2000"]),
        ("MIG-2,0", ["MIG-2", "GPU-0000"]),
        ("0,-1,2", ["GPU-0000"]),
        ("0,7,2", ["GPU-0000"]),
        ("", []),
        ("-1", []),
    ],
)
def test_gpus_that_cuda_visible_devices_names(machine: Machine, names: str | None, uuids: list[str]) -> None:
    assert [each.uuid for each in visible_gpus(read_gpus(), names)] == uuids


@pytest.mark.parametrize(
    ("settings", "own", "observed"),
    [
        ({"engine": "torch"}, ["GPU-2000"], ["GPU-2000"]),
        ({"engine": "torch", "device": "cuda:1"}, ["GPU-0000"], ["GPU-0000"]),
        ({"engine": "torch", "group_gpus": "2,0"}, ["GPU-2000"], ["GPU-2000", "GPU-0000"]),
        ({"engine": "torch", "device": "cpu"}, [], []),
        ({"engine": "echo"}, [], []),
        ({"engine": "tensorrt-llm"}, ["GPU-2000", "GPU-0000"], ["GPU-2000", "GPU-0000"]),
    ],
)
def test_gpus_of_a_shard(machine: Machine, settings: dict[str, object], own: list[str], observed: list[str]) -> None:
    found = gpus_of_shard(ShardConfig.of(**settings), {"CUDA_VISIBLE_DEVICES": "2,0"})
    assert [[each.uuid for each in gpus] for gpus in found] == [own, observed]


def test_without_a_driver_one_reason(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    monkeypatch.delenv("NVML_STANDIN")
    with pytest.raises(GpusUnreadable, match=r"^there is no NVIDIA driver$"):
        nvml()


@pytest.mark.parametrize(("text", "cores"), [("0-3,8", [0, 1, 2, 3, 8]), ("5\n", [5]), ("0,2-3", [0, 2, 3])])
def test_lists_of_cores(text: str, cores: list[int]) -> None:
    assert parse_cores(text) == cores
    assert core_list(cores) == text.strip()


def test_packages_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch, machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "cuda" / "core").mkdir(parents=True)
    (tmp_path / "cuda" / "core" / "__init__.py").write_text("raise TypeError('two versions\\nof one struct')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        GpusUnreadable, match=r"^cuda-python cannot be imported \(TypeError: two versions of one struct\)$"
    ):
        nvml()


BOUND = """
import json, os
from text_generation_shard.gpus import Gpu, stay_near

every = os.sched_getaffinity(0)
first, *others = sorted(every)
found = []
for gpus, chosen in (([], every), ([{first}], every), ([{first}], set(others)), ([{first}], {first, *others[:-1]})):
    os.sched_setaffinity(0, chosen)
    stay_near([Gpu(0, "GPU-0", "", 0, "9.0", (0,), frozenset(cores)) for cores in gpus])
    found.append(sorted(os.sched_getaffinity(0)))
print(json.dumps(found))
"""


def test_a_process_stays_near_its_gpu_unless_cores_were_chosen() -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core: there is no choice")
    command = [sys.executable, "-c", BOUND]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    assert json.loads(lines[-1]) == [cores, cores[:1], cores[1:], cores[:-1]]


class Watched:
    """A watch, and what it reported."""

    def __init__(self) -> None:
        self.states: queue.SimpleQueue[list[pb.GpuState]] = queue.SimpleQueue()
        self.faults: queue.SimpleQueue[str] = queue.SimpleQueue()
        Thread(
            target=watch_gpus, args=(read_gpus(), self.states.put, self.faults.put), name="gpus", daemon=True
        ).start()
        self.first = self.states.get(timeout=10)


def test_states_of_gpus(machine: Machine) -> None:
    machine.change(2, utilization=None, reasons=["gpu_idle", "a reason of tomorrow"])
    first, _, third = Watched().first
    assert first == pb.GpuState(
        index=0,
        uuid="GPU-0000",
        memory_used_bytes=10 * GIB,
        memory_total_bytes=141 * GIB,
        utilization=0.4,
        power_watts=700.5,
        temperature_celsius=33,
        throttle_reasons=["sw_power_cap"],
        corrected_ecc_errors=2,
        uncorrected_ecc_errors=0,
    )
    assert not third.HasField("utilization")
    assert not third.throttle_reasons


@pytest.mark.parametrize(
    ("event", "fault"),
    [
        ({"xid": 79}, "GPU 2 (GPU-2000): Xid 79, GPU has fallen off the bus"),
        ({"xid": 94}, "GPU 2 (GPU-2000): Xid 94, contained memory error"),
        ({"type": "double_bit_ecc_error"}, "GPU 2 (GPU-2000): uncorrectable ECC error"),
        ({"lost": True}, "GPU 2 (GPU-2000): the GPU is lost"),
        ({"xid": 154}, "GPU 2 (GPU-2000): Xid 154, the GPU needs a reset"),
    ],
)
def test_faults(machine: Machine, event: dict[str, object], fault: str) -> None:
    machine.change(2, field_230=1)
    watched = Watched()
    machine.event(2, **event)
    assert watched.faults.get(timeout=10) == fault


def test_errors_of_programs_are_no_faults(machine: Machine) -> None:
    watched = Watched()
    for harmless in (13, 31, 43, 45, 63, 92, 154):
        machine.event(2, xid=harmless)
    watched.states.get(timeout=10)
    watched.states.get(timeout=10)
    assert watched.faults.empty()


def test_without_events_more_ecc_errors_are_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = gpu(0, field_4=3)
    del silent["event_types"]
    made = Machine(tmp_path / "silent", [silent])
    with importable(made, monkeypatch):
        watched = Watched()
        watched.states.get(timeout=10)
        assert watched.faults.empty()
        made.change(0, field_4=4)
        assert watched.faults.get(timeout=10) == "GPU 0 (GPU-0000): uncorrectable ECC error"
