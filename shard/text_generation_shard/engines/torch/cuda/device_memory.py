"""How much of a GPU's memory a server may still take."""

from __future__ import annotations

import torch

from text_generation_shard.engines.torch.memory import peak_memory, reset_peak, total_memory

LEAST_MARGIN = 512 << 20
"""Bytes left over for what no measurement sees: fragments, and libraries that load more with time."""
MARGIN = 0.01
"""The same as a share of the device's memory; the larger of the two counts."""


class DeviceMemory:
    """Counts for one device, of which `fraction` may be used, by whomever; a CPU's is that of the machine."""

    def __init__(self, device: torch.device, fraction: float) -> None:
        self._device = device
        self._fraction = fraction

    def begin_measuring(self) -> None:
        """Count the peak from here on."""
        if self._device.type != "cuda":
            reset_peak()
            return
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def in_use(self) -> int:
        """Bytes taken on the device now, by anybody."""
        if self._device.type != "cuda":
            return 0
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def spare_bytes(self) -> int:
        """What is left beside the peak since `begin_measuring` and what others hold: libraries, other processes."""
        if self._device.type != "cuda":
            return int(total_memory() * self._fraction) - peak_memory()
        total = torch.cuda.mem_get_info(self._device)[1]
        others = self.in_use() - torch.cuda.memory_reserved(self._device)
        margin = max(LEAST_MARGIN, int(total * MARGIN))
        return int(total * self._fraction) - others - torch.cuda.max_memory_allocated(self._device) - margin
