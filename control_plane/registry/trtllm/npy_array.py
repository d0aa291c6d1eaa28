"""A strict reader of the headers of .npy files that strangers upload. Never unpickles, never reads array data.

numpy's own reader trusts the shape in the header; this one compares it with the file's size.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

from control_plane.registry.peft.safetensors_header import refuse, refuse_lfs_pointer

_MAGIC = b"\x93NUMPY"
MAX_HEADER_BYTES = 4096  # np.save writes 128 for arrays of up to three dimensions
_MAX_DIGITS = 15  # of a dimension
_HEADER = re.compile(
    r"\s*\{\s*'descr'\s*:\s*'(?P<descr>[^']{1,16})'\s*,"
    r"\s*'fortran_order'\s*:\s*(?P<fortran>True|False)\s*,"
    r"\s*'shape'\s*:\s*\((?P<shape>[0-9, ]{0,200})\)\s*,?\s*\}\s*\Z"
)


@dataclass(frozen=True, slots=True)
class NpyArray:
    """Where the rows of an array lie."""

    dtype: str  # one of the values that were given to `read_npy`
    num_rows: int
    num_columns: int
    itemsize: int
    start: int  # of the first value, bytes into the file

    def row_start(self, row: int) -> int:
        """Where a row begins, bytes into the file."""
        return self.start + row * self.num_columns * self.itemsize


def read_npy(file: BinaryIO, field: str, dtypes: Mapping[str, tuple[str, int]]) -> NpyArray:
    """The array of an open file, of shape [rows, columns] or [1, rows, columns]. Raises InvalidAdapter.

    `dtypes` gives for each accepted type, as numpy writes it, a name and the bytes of a value.
    """
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(12)
    refuse_lfs_pointer(prefix[:8], field)
    if not prefix.startswith(_MAGIC) or len(prefix) < 12:
        raise refuse(field, "is not a .npy file; save the array with numpy.save")
    width = 2 if prefix[6] == 1 else 4
    header_size = int.from_bytes(prefix[8 : 8 + width], "little")
    if prefix[6] not in (1, 2, 3) or header_size > MAX_HEADER_BYTES:
        raise refuse(
            field, f"has a header of version {prefix[6]} and {header_size} bytes; save the array with numpy.save"
        )
    start = 8 + width + header_size
    file.seek(8 + width)
    match = _HEADER.match(file.read(header_size).decode("latin-1"))
    if match is None:
        raise refuse(field, "its header is not that of a plain array; save the array with numpy.save")
    descr, shape = match["descr"], _shape(match["shape"], field)
    if descr not in dtypes:
        raise refuse(field, f"holds values of type {descr!r}; expected one of {', '.join(map(repr, dtypes))}")
    if match["fortran"] == "True":
        raise refuse(field, "is in Fortran order; save numpy.ascontiguousarray of it")
    if len(shape) == 3 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != 2 or 0 in shape:
        raise refuse(field, f"has the shape {list(shape)}; [rows, columns] or [1, rows, columns] is expected")
    dtype, itemsize = dtypes[descr]
    expected = start + math.prod(shape) * itemsize
    if size != expected:
        raise refuse(
            field, f"has {size} bytes, its shape {list(shape)} needs {expected}; it was cut off or is not whole"
        )
    return NpyArray(dtype, shape[0], shape[1], itemsize, start)


def _shape(text: str, field: str) -> tuple[int, ...]:
    sizes = [size.strip() for size in text.split(",")]
    sizes = sizes[:-1] if sizes and not sizes[-1] else sizes
    if not all(size.isdecimal() and len(size) <= _MAX_DIGITS for size in sizes):
        raise refuse(field, "its header is not that of a plain array; save the array with numpy.save")
    return tuple(int(size) for size in sizes)
