"""The memory that the KV cache may still take, of a GPU or of the machine, and the peak memory of this process."""

import resource
from pathlib import Path

import torch

from text_generation_common.memory import total_memory

LARGEST_KEPT = 31 << 20
"""Just below the size (32 MiB) up to which glibc raises its threshold for keeping freed blocks."""
MIN_MARGIN = 512 << 20
"""Bytes reserved for unmeasured use, as of libraries that load more over time."""
MARGIN_FRACTION = 0.01
"""The same as a share of the device's memory; the larger of the two counts."""


def keep_freed_memory() -> None:
    """Make glibc keep large freed blocks for the next step (mallopt(3)): page faults took a tenth of the time of a step."""
    torch.empty(LARGEST_KEPT, dtype=torch.uint8)


def reset_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        # The peak then includes loading, which errs on the safe side.
        return


def peak_memory() -> int:
    """Return the peak resident memory of this process since `reset_peak`, in bytes."""
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class DeviceMemory:
    """Measures one device, of which `fraction` may be used in total; for a CPU, the memory of the machine."""

    def __init__(self, device: torch.device, fraction: float) -> None:
        self._device = device
        self._fraction = fraction

    def begin_measuring(self) -> None:
        if self._device.type != "cuda":
            reset_peak()
            return
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def in_use(self) -> int:
        """Return the bytes in use on the device, by all processes."""
        if self._device.type != "cuda":
            return 0
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def spare_bytes(self) -> int:
        """Return the bytes left beside the peak since `begin_measuring` and the memory of libraries and other processes.

        The gaps between tensors in the allocator's segments are left out too: the KV cache does not fit into them.
        """
        if self._device.type != "cuda":
            return int(total_memory() * self._fraction) - peak_memory()
        total = torch.cuda.mem_get_info(self._device)[1]
        others = self.in_use() - torch.cuda.memory_allocated(self._device)
        peak = torch.cuda.max_memory_allocated(self._device)
        return int(total * self._fraction) - others - peak - margin_of(total)


def margin_of(total: int) -> int:
    """Return the bytes that stay free on a device with `total` bytes."""
    return max(MIN_MARGIN, int(total * MARGIN_FRACTION))
