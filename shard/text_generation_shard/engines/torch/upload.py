"""Between host and device without a wait.

A copy between pageable memory and a GPU stops Python until the stream has done all that was launched before. Here copies go
by pinned memory and are only launched, on the current stream. torch's allocator of pinned memory marks a block at each such
copy and gives it away again only when the stream is past the mark, so nobody need keep the source.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[len(values)] on the device. `dtype` is one that numpy has: it reads a list in half of torch's time."""
    host = torch.empty(len(values), dtype=dtype, pin_memory=device.type == "cuda")
    host.numpy()[:] = values
    return host.to(device, non_blocking=True)


def upload_rows(rows: Sequence[Tensor], device: torch.device) -> Tensor:
    """[len(rows), n] on the device: host tensors [n] of one dtype."""
    host = torch.empty(len(rows), *rows[0].shape, dtype=rows[0].dtype, pin_memory=device.type == "cuda")
    torch.stack(list(rows), out=host)
    return host.to(device, non_blocking=True)


def download(tensor: Tensor) -> Tensor:
    """A copy in host memory, to be read when the device is past this point of the stream; off a GPU the tensor itself."""
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
