"""Where the values of an adapter's tensors come from, block by block, checked and as they are served."""

from __future__ import annotations

from typing import BinaryIO, Protocol

import numpy as np

from control_plane.registry.peft.chunks.tensor_codec import STORED, StoredArray, convert, is_finite
from control_plane.registry.peft.safetensors_header import FIELD, ITEMSIZE, TensorEntry, refuse, shorten


class TensorSource(Protocol):
    """Where the values of an adapter's tensors come from."""

    def block(self, entry: TensorEntry, row: int, column: int, count: int, width: int) -> tuple[StoredArray, str]:
        """[count, width]: a block of the tensor that begins at `row` and `column`, and its type in safetensors' words.

        Raises InvalidAdapter.
        """
        ...


class FileSource:
    """The tensors of an open file, each with its values row by row."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def block(self, entry: TensorEntry, row: int, column: int, count: int, width: int) -> tuple[StoredArray, str]:
        """See TensorSource."""
        num_columns = entry.shape[1] if len(entry.shape) == 2 else 1
        raw = read_block(self._file, entry.start, ITEMSIZE[entry.dtype], num_columns, row, column, count, width)
        return np.frombuffer(raw, dtype=STORED[entry.dtype]).reshape(count, width), entry.dtype


def read_block(
    file: BinaryIO, start: int, itemsize: int, num_columns: int, row: int, column: int, count: int, width: int
) -> bytes:
    """`count` rows of `width` values each, of a tensor that begins at `start`. Raises InvalidAdapter."""
    num_reads, values_each = (1, count * width) if width == num_columns else (count, width)
    parts = []
    for index in range(num_reads):
        file.seek(start + ((row + index) * num_columns + column) * itemsize)
        parts.append(file.read(values_each * itemsize))
        if len(parts[-1]) != values_each * itemsize:
            raise refuse(FIELD, "became shorter while it was read; send it again")
    return parts[0] if num_reads == 1 else b"".join(parts)


def served_block(
    source: TensorSource, entry: TensorEntry, begin: tuple[int, int], size: tuple[int, int], dtype: str
) -> StoredArray:
    """A block of the tensor, of this size, as `dtype`. Raises InvalidAdapter for values that cannot be served."""
    values, stored = source.block(entry, *begin, *size)
    if not is_finite(values, stored):
        raise refuse(shorten(entry.name), "holds NaN or infinite values; the training diverged")
    converted = convert(values, stored, dtype)
    if converted is None:
        raise refuse(shorten(entry.name), f"holds a value too large for {dtype}, the base model's type")
    return converted
