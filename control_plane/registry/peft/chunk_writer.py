"""Writes one chunk of the packed layout to a file, tensor by tensor, with a few MiB of values in memory.

Called by ingest.py. A large transposed tensor is written in blocks, each to many places of the file; then everything
is read once more, in order, for the hashes: by a second thread, while the next chunk is written.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from contract.packed_layout import ITEMSIZE
from control_plane.errors import FieldViolation, InvalidAdapter
from control_plane.registry.peft.safetensors_header import FIELD, TensorEntry, refuse, shorten
from control_plane.registry.peft.safetensors_header import ITEMSIZE as SOURCE_ITEMSIZE
from control_plane.registry.peft.tensor_codec import Float32Array, decode, encode

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


class TensorSource(Protocol):
    """Where the values of an adapter's tensors come from."""

    def values(self, entry: TensorEntry, row: int, column: int, count: int, width: int) -> Float32Array:
        """[count, width]: a block of the tensor that begins at `row` and `column`. Raises InvalidAdapter."""
        ...


class FileSource:
    """The tensors of an open file, each with its values row by row."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def values(self, entry: TensorEntry, row: int, column: int, count: int, width: int) -> Float32Array:
        """See TensorSource."""
        num_columns = entry.shape[1] if len(entry.shape) == 2 else 1
        itemsize = SOURCE_ITEMSIZE[entry.dtype]
        raw = read_block(self._file, entry.start, itemsize, num_columns, row, column, count, width)
        return decode(raw, entry.dtype, (count, width))


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
    return b"".join(parts)


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


@dataclass(frozen=True, slots=True)
class WrittenChunk:
    """What the manifest says of a chunk."""

    size_bytes: int
    sha256: str
    tensor_sha256: tuple[str, ...]  # of the tensors, in the order in which they were given


def write_chunk(
    out: BinaryIO, source: TensorSource, tensors: Sequence[PackedTensor | ComputedTensor], check: Callable[[], None]
) -> WrittenChunk:
    """Write the chunk to `out`, an empty file open for reading and writing.

    Raises InvalidAdapter with all tensors whose values cannot be served.

    `check` is called every few MiB, and may raise to end the work.
    """
    head_bytes = _write_values(out, source, tensors, check)
    out.seek(0)
    return _hash_chunk(out, head_bytes, tensors, check)


def begin_chunk(
    path: Path,
    source: TensorSource,
    tensors: Sequence[PackedTensor | ComputedTensor],
    check: Callable[[], None],
    hashing: Executor,
) -> Future[WrittenChunk]:
    """Write the chunk to a new file. The threads of `hashing` compute its hashes while the caller goes on.

    Raises as `write_chunk`.
    """
    with path.open("xb") as out:
        head_bytes = _write_values(out, source, tensors, check)

    def hash_file() -> WrittenChunk:
        with path.open("rb") as file:
            return _hash_chunk(file, head_bytes, tensors, check)

    return hashing.submit(hash_file)


def _write_values(
    out: BinaryIO, source: TensorSource, tensors: Sequence[PackedTensor | ComputedTensor], check: Callable[[], None]
) -> int:
    """Write all of the chunk; returns the bytes of its header."""
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
            else:
                _write_tensor(out, source, tensor, check)
        except InvalidAdapter as error:
            violations += error.violations
        position += tensor.size_bytes
    if violations:
        raise InvalidAdapter(*violations)
    out.truncate(position)  # a tensor's last values may be zeros that were not written
    return len(head)


def _hash_chunk(
    file: BinaryIO, head_bytes: int, tensors: Sequence[PackedTensor | ComputedTensor], check: Callable[[], None]
) -> WrittenChunk:
    whole = hashlib.sha256(file.read(head_bytes))
    hashes = tuple(_hash_tensor(file, tensor.size_bytes, whole, check) for tensor in tensors)
    return WrittenChunk(file.tell(), whole.hexdigest(), hashes)


def _header(tensors: Sequence[PackedTensor | ComputedTensor]) -> bytes:
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
    """Convert the tensor block by block, and write each block to its places behind `out`'s position."""
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
            values = _convert(source.values(entry, row, column, count, width), tensor)
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


def _convert(values: Float32Array, tensor: PackedTensor) -> bytes:
    """A block as it is stored in the chunk. Raises InvalidAdapter for values that cannot be served."""
    entry = tensor.entry
    if not np.isfinite(values).all():
        raise refuse(shorten(entry.name), "holds NaN or infinite values; the training diverged")
    converted = encode(np.ascontiguousarray(values.T) if tensor.is_transposed else values, tensor.dtype)
    if converted is None:
        raise refuse(shorten(entry.name), f"holds a value too large for {tensor.dtype}, the base model's type")
    return converted


def _hash_tensor(file: BinaryIO, size_bytes: int, whole: Any, check: Callable[[], None]) -> str:
    """The hash of the next so many bytes, which `whole` takes in too."""
    own = hashlib.sha256()
    for begin in range(0, size_bytes, HASHED_BYTES):
        check()
        data = file.read(min(HASHED_BYTES, size_bytes - begin))
        own.update(data)
        whole.update(data)
    return own.hexdigest()
