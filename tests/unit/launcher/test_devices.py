from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from nvml_standin import Machine, gpu, importable
from structlog.testing import capture_logs

from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.devices import Devices, count_visible, find_devices, some_visible
from text_generation_launcher.environment import environment_report


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 3),
        ({"CUDA_VISIBLE_DEVICES": "GPU-0a1b, GPU-2c3d"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, 1),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, None),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, None),
        ({"NVIDIA_VISIBLE_DEVICES": "none"}, 0),
        ({"NVIDIA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0", "NVIDIA_VISIBLE_DEVICES": "0,1"}, 1),
    ],
)
def test_number_of_visible_devices_from_the_environment(environ: dict[str, str], count: int | None) -> None:
    assert count_visible(environ) == count


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({}, ["0", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "4,2"}, ["4", "2"]),
        ({"NVIDIA_VISIBLE_DEVICES": "4,2"}, ["0", "1"]),
    ],
)
def test_name_of_the_nth_visible_device(environ: dict[str, str], names: list[str]) -> None:
    assert [some_visible(environ, n) for n in range(2)] == names


@pytest.mark.parametrize(
    ("environ", "count", "name"),
    [
        ({}, 2, "NVIDIA H200"),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1"}, 1, "a slice"),
        ({"CUDA_VISIBLE_DEVICES": "MIG-GPU-0/1/0"}, 1, "NVIDIA H200"),
    ],
)
async def test_devices_of_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], count: int, name: str
) -> None:
    """A GPU with MIG slices counts once."""
    parts = [{"uuid": "MIG-1", "name": "a slice", "memory": 1, "used": 0}]
    machine = Machine(tmp_path / "machine", [gpu(0), gpu(1, slices=parts)])
    with importable(machine, monkeypatch):
        found = await find_devices(environ)
    assert (found.count, found.name, found.driver) == (count, name, "580.95.05 (CUDA 13.0)")


async def test_without_a_driver_one_log_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with importable(Machine(tmp_path / "machine", []), monkeypatch), capture_logs() as records:
        monkeypatch.delenv("NVML_STANDIN")
        assert (await find_devices({"CUDA_VISIBLE_DEVICES": "0,1"})) == Devices(2, None)
        assert await find_devices({"CUDA_VISIBLE_DEVICES": ""}) == Devices(0, None)
    assert [(record["event"], record["reason"]) for record in records] == [
        ("GPUs are not read", "there is no NVIDIA driver")
    ]


@pytest.mark.parametrize(("as_json", "read"), [(True, json.loads), (False, yaml.safe_load)])
async def test_the_report_names_slices_and_hides_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool, read: Callable[[str], Any]
) -> None:
    parts = [{"uuid": "MIG-1", "name": "a slice", "memory": 1 << 30, "used": 0}]
    config = LauncherConfig.of(env=True, json_output=as_json, shard_token="a-secret")
    with importable(Machine(tmp_path / "machine", [gpu(0, slices=parts)]), monkeypatch):
        report = read(await environment_report(config, {"CUDA_VISIBLE_DEVICES": "0"}))
    (whole,) = report["gpus"]
    (part,) = whole["mig"]
    assert (whole["uuid"], whole["visible"], part["uuid"], part["visible"]) == ("GPU-0000", False, "MIG-1", True)
    assert (part["index"], part["memory_mib"], report["devices"]) == (0, 1024, 1)
    assert (report["settings"]["shard_token"], report["settings"]["num_replicas"]) == ("***", 1)
