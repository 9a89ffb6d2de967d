"""The tiles of an image in Llama 4: the router counts their tokens, and the shard cuts them."""

from struct import Struct

_FLOAT32 = Struct("f")
"""The library compares scales in this precision."""


def tiles(width: int, height: int, side: int, most: int) -> tuple[int, int]:
    """Return columns and rows of at most so many tiles: those that shrink the image least, else enlarge it least, with the least area."""

    def scale(grid: tuple[int, int]) -> float:
        exact = min(grid[0] * side / width, grid[1] * side / height)
        rounded: float = _FLOAT32.unpack(_FLOAT32.pack(exact))[0]
        return rounded

    grids = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
    scales = {grid: scale(grid) for grid in grids}
    best = min((each for each in scales.values() if each >= 1), default=max(scales.values()))
    return min((grid for grid in grids if scales[grid] == best), key=lambda grid: grid[0] * grid[1])
