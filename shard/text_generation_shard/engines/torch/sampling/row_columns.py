"""Numbers that some rows of a step bring along, on their way to the device: all of them in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_shard.engines.torch.upload import upload


@dataclass(frozen=True, slots=True)
class Column:
    """On the host: the rows that ask for something, and a number for each."""

    rows: list[int]
    numbers: list[float]


@dataclass(frozen=True, slots=True)
class DeviceColumn:
    """The same on the device."""

    rows: Tensor | None
    """[asking] int64; None if all rows ask."""
    numbers: Tensor
    """[asking, 1] float64."""

    def part(self, tensor: Tensor) -> Tensor:
        """Those rows of `tensor` [rows, …]: the tensor itself if all ask, else a copy."""
        return tensor if self.rows is None else tensor.index_select(0, self.rows)

    def replaced(self, tensor: Tensor, part: Tensor) -> Tensor:
        """`tensor` [rows, …] with `part` for those rows; it may be changed in place."""
        return part if self.rows is None else tensor.index_copy_(0, self.rows, part)


def send(columns: Sequence[Column], num_rows: int, device: torch.device) -> list[DeviceColumn]:
    """`columns` of a step of `num_rows` rows, on the device. None may be empty."""
    if not columns:
        return []
    numbers = upload([number for column in columns for number in column.numbers], torch.float64, device).unsqueeze(1)
    partial = [column.rows for column in columns if len(column.rows) < num_rows]
    rows = upload([row for part in partial for row in part], torch.int64, device) if partial else None
    sent: list[DeviceColumn] = []
    first = first_row = 0
    for column in columns:
        count = len(column.rows)
        index: Tensor | None = None
        if rows is not None and count < num_rows:
            index = rows[first_row : first_row + count]
            first_row += count
        sent.append(DeviceColumn(index, numbers[first : first + count]))
        first += count
    return sent
