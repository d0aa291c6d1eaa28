"""Gives the values of tensors that are parts of rows, as PEFT has them.

A row's B holds the scaling already. Where the adapter's configuration names the scaling, B is divided by it again, and
corrected by at most one step of float32 where that division alone would not give the trained value back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from control_plane.registry.peft.chunks.tensor_codec import Float32Array, StoredArray, decode
from control_plane.registry.peft.chunks.tensor_sources import read_block
from control_plane.registry.peft.safetensors_header import ITEMSIZE, TensorEntry, refuse


@dataclass(frozen=True, slots=True)
class RowTensor(TensorEntry):
    """A part of a row, [rows, columns] or [rows]."""

    first_row: int = 0  # the row that comes first; those before it come last
    divisor: float = 1.0  # the scaling that the values were multiplied by
    # Where the corrections lie, int8 of the tensor's shape, bytes into the file of exact values; None: none.
    corrections: int | None = None
    is_exact: bool = False  # lies in the file of exact values itself


class RowSource:
    """The tensors of an adapter's rows. See tensor_sources.TensorSource."""

    def __init__(self, weights: BinaryIO, exact: BinaryIO | None) -> None:
        self._weights = weights
        self._exact = exact

    def block(self, entry: TensorEntry, row: int, column: int, count: int, width: int) -> tuple[StoredArray, str]:
        """See TensorSource."""
        assert isinstance(entry, RowTensor), "these tensors come from rows"
        num_rows = entry.shape[0]
        begin = (row + entry.first_row) % num_rows
        first = min(count, num_rows - begin)
        blocks = [self._block(entry, begin, column, first, width)]
        if first < count:
            blocks.append(self._block(entry, 0, column, count - first, width))
        return (np.concatenate(blocks) if len(blocks) > 1 else blocks[0]), "F32"

    def _block(self, entry: RowTensor, row: int, column: int, count: int, width: int) -> Float32Array:
        num_columns = entry.shape[1] if len(entry.shape) == 2 else 1
        place = (num_columns, row, column, count, width)
        file = self._exact if entry.is_exact else self._weights
        assert file is not None, "a tensor lies in a file that was opened"
        raw = read_block(file, entry.start, ITEMSIZE[entry.dtype], *place)
        values = decode(raw, entry.dtype, (count, width))
        if entry.divisor == 1.0 and entry.corrections is None:
            return values
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused later
            values = (values.astype(np.float64) / entry.divisor).astype(np.float32)
        if entry.corrections is None:
            return values
        assert self._exact is not None, "corrections lie in a file that was opened"
        steps = np.frombuffer(read_block(self._exact, entry.corrections, 1, *place), np.int8).reshape(count, width)
        if int(np.abs(steps.astype(np.int16)).max()) > 1:
            raise refuse(entry.name, "has a correction that is not -1, 0 or 1; write it with `motet convert` again")
        towards = np.where(steps > 0, np.float32(np.inf), np.float32(-np.inf)).astype(np.float32)
        corrected: Float32Array = np.where(steps == 0, values, np.nextafter(values, towards)).astype(np.float32)
        return corrected
