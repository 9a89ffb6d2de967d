"""The conversion of keys and values to the data type of the cache."""

import triton
import triton.language as tl

E4M3FN_MAX = tl.constexpr(448.0)
E5M2_MAX = tl.constexpr(57344.0)


@triton.jit
def to_cache(values: tl.tensor, cache_layer: tl.tensor) -> tl.tensor:
    """Return float32 `values` in the data type of `cache_layer`; FP8 saturates, and NaN stays NaN."""
    if cache_layer.dtype.element_ty.primitive_bitwidth == 8:
        largest: tl.constexpr = E4M3FN_MAX if cache_layer.dtype.element_ty == tl.float8e4nv else E5M2_MAX
        values = tl.clamp(values, -largest, largest, propagate_nan=tl.PropagateNan.ALL)
    return values.to(cache_layer.dtype.element_ty)
