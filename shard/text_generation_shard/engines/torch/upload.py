"""Copies between host and device without waiting.

A copy between pageable memory and a GPU blocks Python until the stream has done everything launched before it. Here copies go
through pinned memory and are only launched, on the current stream. torch's allocator of pinned memory records an event at each
such copy and reuses a block only after the stream has passed it, so the source need not be kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [len(values)] on the device. `dtype` must exist in numpy, which reads a list in half of torch's time."""
    host = torch.empty(len(values), dtype=dtype, pin_memory=device.type == "cuda")
    host.numpy()[:] = values
    return host.to(device, non_blocking=True)


def upload_rows(rows: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return [len(rows), n] on the device, from host tensors [n] of one dtype."""
    host = torch.empty(len(rows), *rows[0].shape, dtype=rows[0].dtype, pin_memory=device.type == "cuda")
    torch.stack(list(rows), out=host)
    return host.to(device, non_blocking=True)


def download(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, valid once the stream has passed this point; the tensor itself if it is no GPU's."""
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
