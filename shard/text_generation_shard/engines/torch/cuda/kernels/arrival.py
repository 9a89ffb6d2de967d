"""Programs that share a result: the one that is done last puts it together.

Saves the launch of a second kernel. Which program is last differs from run to run; what it reads does not.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def arrives_last(arrivals: tl.tensor, expected: int) -> tl.tensor:
    """Count this program in at `arrivals` (a pointer to int32); whether it is the last of the `expected` ones.

    What the others stored before they arrived may then be read. The counter is zero again afterwards: it has to be zero
    before the first launch only.
    """
    # One thread counts for the program: the others' stores must be behind it.
    tl.debug_barrier()
    before = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
    last = before == expected - 1
    if last:
        tl.store(arrivals, 0)
    return last
