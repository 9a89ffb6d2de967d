"""A counter for programs with a common result: the last program to arrive combines the partial results.

This saves the launch of a second kernel. The last program differs from run to run; the result does not.
"""

import triton
import triton.language as tl


@triton.jit
def arrives_last(arrivals: tl.tensor, expected: int) -> tl.tensor:
    """Count this program at `arrivals` (a pointer to int32); return True if it is the last of the `expected` ones.

    The last program may read everything that the others stored before they arrived. The counter is reset to zero, so it needs
    to be zeroed only before the first launch.
    """
    # One thread counts for the program: all threads must have stored before.
    tl.debug_barrier()
    before = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
    last = before == expected - 1
    if last:
        tl.store(arrivals, 0)
    return last
