"""The number of CPU cores of a process: its affinity, and the quotas of its cgroups."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from text_generation_common.cpus import usable_cpus

CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "100000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "10000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "110000 100000\n"}, min(2, CORES)),
        ("0::/\n", {"cpu.max": "max 100000\n"}, CORES),
        ("0::/\n", {"cpu.max": "99900000 100000\n"}, CORES),
        (
            "0::/a.slice/b.service\n",
            {"a.slice/b.service/cpu.max": "max 100000\n", "a.slice/cpu.max": "50000 100000\n"},
            1,
        ),
        ("0::/../other\n", {"cpu.max": "100000 100000\n"}, 1),
        (
            "4:cpu,cpuacct:/docker/x\n1:name=systemd:/\n0::/\n",
            {"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            1,
        ),
        ("4:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, CORES),
        ("5:cpuset:/\n", {"cpuset/cpu.cfs_quota_us": "1\n", "cpuset/cpu.cfs_period_us": "1\n"}, CORES),
        ("", {}, CORES),
    ],
)
def test_a_quota_lowers_the_number_of_cores(
    groups: str, files: Mapping[str, str], expected: int, tmp_path: Path
) -> None:
    for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{name}": files[name] for name in files}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="ascii")
    assert usable_cpus(tmp_path) == expected


def test_without_cgroups_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cpus(tmp_path) == CORES
