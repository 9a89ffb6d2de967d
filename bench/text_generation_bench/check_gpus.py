"""Compare the reading of GPUs, the metrics of a running server and the cores of its shards with nvidia-smi.

python -m text_generation_bench.check_gpus                              # the reading alone
python -m text_generation_bench.check_gpus --model FOLDER --replicas 2  # and a server, with random weights of that shape

The exit code is 1 if a value differs.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil

from text_generation_bench.gpu_server import last_lines, launched
from text_generation_shard.gpus import Gpu, core_list, driver_version, parse_cores, read_gpus

STATIC = "index,uuid,name,memory.total,compute_cap,driver_version,mig.mode.current"
DYNAMIC = (
    "index,memory.used,memory.total,utilization.gpu,power.draw.instant,temperature.gpu,"
    "ecc.errors.corrected.volatile.total,ecc.errors.uncorrected.volatile.total,clocks_event_reasons.active"
)
REASON_BITS = {
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
}
_SAMPLE = re.compile(r'^text_generation_gpu_(\w+)\{replica="(\d+)",gpu="(\d+)",uuid="[^"]*"(?:,\w+="(\w+)")?\} (\S+)$')

Close = Callable[[float, float], bool]


class GpuComparison:
    """Values of two sources, printed one a line."""

    def __init__(self) -> None:
        self.different = 0

    def compare(self, what: str, ours: object, theirs: object, *, same: bool) -> None:
        """Print a value of both."""
        self.different += not same
        print(f"{'ok     ' if same else 'DIFFERS'} {what}: {ours} | nvidia-smi: {theirs}", flush=True)


def main() -> None:
    """Compare, and exit."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", type=Path)
    options.add_argument("--replicas", type=int, default=1)
    options.add_argument(
        "--seconds", type=float, default=5.0, help="time from the start of the server to the comparison"
    )
    chosen = options.parse_args()
    result = GpuComparison()
    gpus = read_gpus()
    compare_reading(result, gpus)
    if chosen.model is not None:
        compare_server(result, gpus, chosen.model, chosen.replicas, chosen.seconds)
    raise SystemExit(1 if result.different else 0)


def compare_reading(result: GpuComparison, gpus: tuple[Gpu, ...]) -> None:
    """Compare what is read once."""
    rows, topology = query(STATIC), topology_columns()
    result.compare("number of GPUs", len(gpus), len(rows), same=len(gpus) == len(rows))
    for gpu, row in zip(gpus, rows, strict=False):
        index, uuid, name, memory, capability, driver, mig = row
        result.compare("index", gpu.index, index, same=str(gpu.index) == index)
        result.compare("uuid", gpu.uuid, uuid, same=gpu.uuid == uuid)
        result.compare("name", gpu.name, name, same=gpu.name == name)
        result.compare("memory, MiB", gpu.memory >> 20, memory, same=str(gpu.memory >> 20) == memory)
        result.compare(
            "compute capability", gpu.compute_capability, capability, same=gpu.compute_capability == capability
        )
        result.compare("driver", driver_version(), driver, same=driver_version().startswith(f"{driver} "))
        result.compare("MIG", gpu.mig, mig, same={"Enabled": True, "Disabled": False}.get(mig) == gpu.mig)
        cores, nodes = topology.get(gpu.index, ("N/A", "N/A"))
        ours = (core_list(gpu.cpus), core_list(gpu.numa_nodes))
        result.compare("near cores", ours[0] or "N/A", cores, same=as_set(ours[0]) == as_set(cores))
        result.compare("NUMA nodes", ours[1] or "N/A", nodes, same=as_set(ours[1]) == as_set(nodes))


def compare_server(result: GpuComparison, gpus: tuple[Gpu, ...], model: Path, replicas: int, seconds: float) -> None:
    """Compare the metrics of a server, and print where its shards run."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        arguments = ("--load-format", "dummy", "--num-replicas", str(replicas), "--env")
        with launched(model, arguments, log) as server:
            time.sleep(seconds)
            with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as response:
                samples = [match for line in response.read().decode().splitlines() if (match := _SAMPLE.match(line))]
            compare_metrics(result, samples, replicas)
            compare_cores(result, gpus, server.launcher.pid)
        print("\n".join(line for line in last_lines(log, 60).splitlines() if re.search("GPU|gpu|cores", line)))


def compare_metrics(result: GpuComparison, samples: list[re.Match[str]], replicas: int) -> None:
    """Compare the gauges of GPUs with what nvidia-smi reads a moment later."""
    found = {(each[1], each[3], each[4] or ""): float(each[5]) for each in samples}
    result.compare(
        "replicas with GPUs",
        len({each[2] for each in samples}),
        replicas,
        same=len({each[2] for each in samples}) == replicas,
    )
    near: Close = lambda a, b: abs(a - b) <= max(0.02 * b, 1.0)  # noqa: E731
    for index, used, total, busy, power, celsius, corrected, uncorrected, active in query(DYNAMIC):
        if ("memory_used_bytes", index, "") not in found:
            continue
        rows: list[tuple[str, str, str, float, Close]] = [
            ("memory_used_bytes", "", used, 2**20, near),
            ("memory_total_bytes", "", total, 2**20, lambda a, b: a == b),
            ("utilization_ratio", "", busy, 0.01, lambda a, b: abs(a - b) <= 0.3),
            ("power_watts", "", power, 1, lambda a, b: abs(a - b) <= max(15.0, 0.15 * b)),
            ("temperature_celsius", "", celsius, 1, lambda a, b: abs(a - b) <= 3),
            ("ecc_errors_total", "corrected", corrected, 1, lambda a, b: a == b),
            ("ecc_errors_total", "uncorrected", uncorrected, 1, lambda a, b: a == b),
        ]
        for name, label, text, unit, close in rows:
            ours = found.get((name, index, label))
            theirs = float(text) * unit if re.fullmatch(r"[\d.]+", text) else None
            same = ours is None if theirs is None else ours is not None and close(ours, theirs)
            result.compare(f"gpu {index} {name} {label}".strip(), ours, theirs, same=same)
        bits = int(active, 16) if active.startswith("0x") else 0
        for reason, bit in REASON_BITS.items():
            ours = found.get(("throttled", index, reason))
            result.compare(f"gpu {index} throttled {reason}", ours, bool(bits & bit), same=ours == bool(bits & bit))


def compare_cores(result: GpuComparison, gpus: tuple[Gpu, ...], launcher: int) -> None:
    """Compare the cores of all threads of the shards with those near their GPUs."""
    allowed = os.sched_getaffinity(launcher)
    for child in psutil.Process(launcher).children():
        command = child.cmdline()
        if "text_generation_shard" not in command:
            continue
        visible = child.environ().get("CUDA_VISIBLE_DEVICES", "0")
        near = set(gpus[int(visible)].cpus) & allowed if visible.isdigit() else set()
        for thread, count in sorted(_threads_by_cores(child.pid).items()):
            expected = core_list(near or allowed)
            result.compare(
                f"shard on GPU {visible}: cores of {count} threads", thread, expected, same=thread == expected
            )


def _threads_by_cores(pid: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        cores = core_list(os.sched_getaffinity(int(task.name)))
        found[cores] = found.get(cores, 0) + 1
    return found


def query(fields: str) -> list[list[str]]:
    """Return the rows of nvidia-smi for these fields."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [[value.strip() for value in row] for row in csv.reader(text.splitlines())]


def topology_columns() -> dict[int, tuple[str, str]]:
    """Return the near cores and NUMA nodes by GPU, from nvidia-smi topo -m."""
    text = subprocess.run(["nvidia-smi", "topo", "-m"], check=False, stdout=subprocess.PIPE, text=True).stdout
    print(text)
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).split("\t") for line in text.splitlines()]
    header = next(
        ([cell.strip() for cell in line] for line in lines if any("CPU Affinity" in cell for cell in line)), []
    )
    found = {}
    for line in lines:
        cells = [cell.strip() for cell in line]
        if (number := re.fullmatch(r"GPU(\d+)", cells[0])) and len(cells) >= len(header) > 0:
            found[int(number[1])] = (cells[header.index("CPU Affinity")], cells[header.index("NUMA Affinity")])
    return found


def as_set(text: str) -> frozenset[int]:
    """Return the numbers of a list, none for N/A."""
    try:
        return frozenset(parse_cores(text))
    except ValueError:
        return frozenset()


if __name__ == "__main__":
    main()
