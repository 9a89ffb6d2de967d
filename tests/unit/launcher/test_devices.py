from __future__ import annotations

import pytest

from text_generation_launcher.devices import Devices, count_visible, find_devices, nth_visible, parse_listing

LISTING = """\
GPU 0: NVIDIA H200 (UUID: GPU-0a1b)
  MIG 1g.18gb     Device  0: (UUID: MIG-1)
GPU 1: NVIDIA H200 (UUID: GPU-2c3d)
"""


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
    assert [nth_visible(environ, n) for n in range(2)] == names


def test_gpu_with_mig_slices_counts_once() -> None:
    assert parse_listing(LISTING) == ("NVIDIA H200", "NVIDIA H200")
    assert parse_listing("") == ()


async def test_without_visible_devices_nvidia_smi_is_not_needed() -> None:
    assert await find_devices({"CUDA_VISIBLE_DEVICES": ""}) == Devices(0, None)
