"""The keys of the prefix tree: token ids as bytes; their comparison."""

from array import array

TOKEN_BYTES = array("I").itemsize


def common_bytes(run: bytes | bytearray, key: bytes, at: int, size: int) -> int:
    """Return the bytes that `run` and `key[at:]` have in common, in whole blocks of `size` bytes."""
    # A binary search that compares each stretch in place: about one pass over the bytes.
    same, differ = 0, min(len(run), len(key) - at) // size + 1
    with memoryview(run) as view:
        if key.startswith(view[: (differ - 1) * size], at):  # most often all of it is the same
            return (differ - 1) * size
        while differ - same > 1:
            middle = (same + differ) // 2
            if key.startswith(view[same * size : middle * size], at + same * size):
                same = middle
            else:
                differ = middle
    return same * size
