"""Writes one chunk of the packed layout to a file, tensor by tensor, with a few MiB of values in memory.

Called by ingest.py. A large tensor is written in blocks, each to several places of the file; then everything is read
once more, in order, for the hashes: by a second thread, while the next chunk is written.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from contract.packed_layout import ITEMSIZE
from control_plane.errors import FieldViolation, InvalidAdapter
from control_plane.registry.peft.chunks.paged_tensor import PagedTensor
from control_plane.registry.peft.chunks.tensor_sources import TensorSource, served_block
from control_plane.registry.peft.safetensors_header import TensorEntry

SLICE_VALUES = 1 << 20  # converted at a time: up to 20 MB with all copies
HASHED_BYTES = 4 << 20  # read at a time
_SAFETENSORS_DTYPE = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int32": "I32"}


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """One tensor of a chunk."""

    name: str  # in the chunk
    entry: TensorEntry  # where it comes from
    dtype: str  # "float32", "bfloat16" or "float16"
    is_transposed: bool = False
    # Rows and columns of the source that the chunk has; None: as many as there are. What it has more is zero.
    size: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """In the chunk."""
        size = self.size or self.entry.shape
        return size[::-1] if self.is_transposed else size

    @property
    def size_bytes(self) -> int:
        """In the chunk."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class ComputedTensor:
    """One tensor of a chunk whose bytes are computed."""

    name: str  # in the chunk
    dtype: str  # also "int32"
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[bytes]]  # in order, a few MiB each; raises InvalidAdapter

    @property
    def size_bytes(self) -> int:
        """In the chunk."""
        return math.prod(self.shape) * {**ITEMSIZE, "int32": 4}[self.dtype]


ChunkTensor = PackedTensor | ComputedTensor | PagedTensor


@dataclass(frozen=True, slots=True)
class WrittenChunk:
    """What the manifest says of a chunk."""

    size_bytes: int
    sha256: str


def write_chunk(
    out: BinaryIO, source: TensorSource, tensors: Sequence[ChunkTensor], check: Callable[[], None]
) -> WrittenChunk:
    """Write the chunk to `out`, an empty file open for reading and writing.

    Raises InvalidAdapter with all tensors whose values cannot be served.

    `check` is called every few MiB, and may raise to end the work.
    """
    _write_values(out, source, tensors, check)
    out.seek(0)
    return _hash_chunk(out, check)


def begin_chunk(
    path: Path,
    source: TensorSource,
    tensors: Sequence[ChunkTensor],
    check: Callable[[], None],
    hashing: Executor,
) -> Future[WrittenChunk]:
    """Write the chunk to a new file. The threads of `hashing` compute its hash while the caller goes on.

    Raises as `write_chunk`.
    """
    with path.open("xb") as out:
        _write_values(out, source, tensors, check)

    def hash_file() -> WrittenChunk:
        with path.open("rb") as file:
            return _hash_chunk(file, check)

    return hashing.submit(hash_file)


def _write_values(
    out: BinaryIO, source: TensorSource, tensors: Sequence[ChunkTensor], check: Callable[[], None]
) -> None:
    """Write all of the chunk."""
    head = _header(tensors)
    out.write(head)
    position = len(head)
    violations: list[FieldViolation] = []
    for tensor in tensors:
        out.seek(position)
        try:
            if isinstance(tensor, ComputedTensor):
                for block in tensor.blocks():
                    check()
                    out.write(block)
            elif isinstance(tensor, PagedTensor):
                tensor.write(out, source, SLICE_VALUES, check)
            else:
                _write_tensor(out, source, tensor, check)
        except InvalidAdapter as error:
            violations += error.violations
        position += tensor.size_bytes
    if violations:
        raise InvalidAdapter(*violations)
    out.truncate(position)  # a tensor's last values may be zeros that were not written


def _hash_chunk(file: BinaryIO, check: Callable[[], None]) -> WrittenChunk:
    digest = hashlib.sha256()
    while data := file.read(HASHED_BYTES):
        check()
        digest.update(data)
    return WrittenChunk(file.tell(), digest.hexdigest())


def _header(tensors: Sequence[ChunkTensor]) -> bytes:
    entries: dict[str, Any] = {}
    position = 0
    for tensor in tensors:
        end = position + tensor.size_bytes
        entries[tensor.name] = {
            "data_offsets": [position, end],
            "dtype": _SAFETENSORS_DTYPE[tensor.dtype],
            "shape": list(tensor.shape),
        }
        position = end
    head = json.dumps(entries, sort_keys=True, separators=(",", ":")).encode("ascii")
    head += b" " * (-len(head) % 8)  # data begins at a multiple of 8 bytes
    return len(head).to_bytes(8, "little") + head


def _write_tensor(out: BinaryIO, source: TensorSource, tensor: PackedTensor, check: Callable[[], None]) -> None:
    """Convert the tensor block by block, and write each block to its places after `out`'s position."""
    entry, itemsize = tensor.entry, ITEMSIZE[tensor.dtype]
    num_rows, num_columns = entry.shape if len(entry.shape) == 2 else (entry.shape[0], 1)
    wanted = tensor.size or entry.shape
    out_rows, out_columns = wanted if len(wanted) == 2 else (wanted[0], 1)
    used_rows, used_columns = min(num_rows, out_rows), min(num_columns, out_columns)
    start = out.tell()
    rows_at_once, columns_at_once = _block_shape(used_rows, used_columns, is_transposed=tensor.is_transposed)
    if used_columns < out_columns or used_columns < num_columns:  # a row is then written alone
        rows_at_once = rows_at_once if tensor.is_transposed else 1
    for row in range(0, used_rows, rows_at_once):
        for column in range(0, used_columns, columns_at_once):
            check()
            count, width = min(rows_at_once, used_rows - row), min(columns_at_once, used_columns - column)
            block = served_block(source, entry, (row, column), (count, width), tensor.dtype)
            values = (block.T if tensor.is_transposed else block).tobytes()
            if not tensor.is_transposed:  # of whole rows, or of a part of one
                out.seek(start + (row * out_columns + column) * itemsize)
                out.write(values)
            elif count == out_rows:
                out.seek(start + column * out_rows * itemsize)
                out.write(values)
            else:
                for index in range(width):
                    out.seek(start + ((column + index) * out_rows + row) * itemsize)
                    out.write(values[index * count * itemsize : (index + 1) * count * itemsize])
    out.seek(start + tensor.size_bytes)


def _block_shape(num_rows: int, num_columns: int, *, is_transposed: bool) -> tuple[int, int]:
    """Rows and columns of the source that are converted at a time: a slice of values.

    Those of a tensor that is transposed are near a square: a read takes a part of a row, a write a part of a column.
    """
    rows = max(1, SLICE_VALUES // num_columns)
    if is_transposed:
        rows = max(rows, math.isqrt(SLICE_VALUES))
    rows = min(rows, num_rows)
    return rows, min(num_columns, max(1, SLICE_VALUES // rows))
