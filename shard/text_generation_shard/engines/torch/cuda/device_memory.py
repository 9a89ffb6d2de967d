"""The memory of a GPU that the KV cache may still take."""

from __future__ import annotations

import torch

from text_generation_shard.engines.torch.memory import peak_memory, reset_peak, total_memory

MIN_MARGIN = 512 << 20
"""Bytes reserved for unmeasured use, as of libraries that load more over time."""
MARGIN_FRACTION = 0.01
"""The same as a share of the device's memory; the larger of the two counts."""


class DeviceMemory:
    """Measures one device, of which `fraction` may be used in total; for a CPU, the memory of the machine."""

    def __init__(self, device: torch.device, fraction: float) -> None:
        self._device = device
        self._fraction = fraction

    def begin_measuring(self) -> None:
        """Measure peak memory from here on."""
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
