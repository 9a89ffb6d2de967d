"""Kernels that begin before the one ahead of them in the stream has ended: programmatic dependent launch.

A chained kernel lets the next one begin as soon as all its own programs have, and does what hangs on no other kernel while
the one ahead ends. It is launched with `launch_pdl`. The kernel after it need not be chained: it waits for the end as ever.
"""

# ruff: noqa: N803 – constants of kernels are in capitals, as Triton has them
from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda


def can_chain(tensor: Tensor) -> bool:
    """Whether kernels can be chained where `tensor` lies: on GPUs from Hopper on."""
    return tensor.is_cuda and _knows_chains(tensor.device.index)


@cache
def _knows_chains(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def let_next_begin(CHAINED: tl.constexpr) -> None:
    """Let the next kernel begin once all programs of this one have come here, if it was launched so."""
    if CHAINED:
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(CHAINED: tl.constexpr) -> None:
    """What another kernel writes may be touched after this only, and so may what another reads be written.

    No access is moved across it.
    """
    if CHAINED:
        cuda.gdc_wait()
