"""Cuts the rows of an adapter into chunks of the packed layout, and gives the chunk writer their values.

Where the module has LoRA too, its part is added to these rows: a worker then uses a row as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import numpy as np

from contract.packed_layout import RANKS_PER_PAGE
from control_plane.registry.peft.chunks.chunk_writer import ComputedTensor
from control_plane.registry.peft.chunks.tensor_codec import Float32Array, decode
from control_plane.registry.peft.rows.row_sets import SLICE_VALUES, Int32Array, RowSet, read_rows, runs, served_values
from control_plane.registry.peft.safetensors_header import ITEMSIZE, TensorEntry

_CHUNK_VALUES = 32 << 20  # of the rows in one chunk


@dataclass(frozen=True, slots=True)
class ReplacedRows:
    """All rows of an adapter, and the files that they are in."""

    sets: tuple[RowSet, ...]
    num_tokens: int | None  # of the adapter's own vocabulary; None: the base model's
    file: BinaryIO
    lora_file: BinaryIO  # of the tensors of LoRA modules


@dataclass(frozen=True, slots=True)
class RowChunk:
    """One chunk: some rows of one set."""

    index: int  # among the chunks of rows
    row_set: RowSet
    ids: Int32Array

    @property
    def chunk_name(self) -> str:
        return f"rows.{self.index}"

    def tensors(self, rows: ReplacedRows, dtype: str) -> list[ComputedTensor]:
        """What is written."""
        name, count, row_set = self.row_set.name, len(self.ids), self.row_set
        ids = self.ids.astype("<i4").tobytes()
        tensors = [
            ComputedTensor(f"{name}.row_ids", "int32", (count,), lambda: iter([ids])),
            ComputedTensor(
                f"{name}.rows", dtype, (count, row_set.width), partial(_row_bytes, row_set, self.ids, rows, dtype)
            ),
        ]
        if row_set.has_bias:
            tensors.append(
                ComputedTensor(f"{name}.row_bias", "float32", (count,), partial(_bias_bytes, row_set, self.ids, rows))
            )
        return tensors

    def described(self) -> dict[str, Any]:
        """The manifest's words."""
        own = {"name": self.row_set.name, "num_rows": len(self.ids), "width": self.row_set.width}
        return {**own, **({"has_bias": True} if self.row_set.has_bias else {})}


def row_chunks(row_sets: Sequence[RowSet]) -> list[RowChunk]:
    """All rows in chunks of at most 128 MiB of float32, each but a set's last with whole pages of rows."""
    chunks: list[RowChunk] = []
    for row_set in sorted(row_sets, key=lambda part: part.name):
        step = max(_CHUNK_VALUES // row_set.width // RANKS_PER_PAGE, 1) * RANKS_PER_PAGE
        for begin in range(0, len(row_set.ids), step):
            chunks.append(RowChunk(len(chunks), row_set, row_set.ids[begin : begin + step]))
    return chunks


def _row_bytes(row_set: RowSet, ids: Int32Array, rows: ReplacedRows, dtype: str) -> Iterator[bytes]:
    for part in _slices(row_set, ids):
        values = _values(row_set, part, rows.file)
        if row_set.lora is not None:
            values = values + _lora_rows(row_set, part, rows.lora_file)
        yield served_values(np.ascontiguousarray(values), f"{row_set.name}.weight", dtype)


def _slices(row_set: RowSet, ids: Int32Array) -> Iterator[Int32Array]:
    """Ids that are computed together: a slice of values, and with LoRA no more than a slice of its columns."""
    step = max(SLICE_VALUES // row_set.width, 1)
    span = SLICE_VALUES if row_set.lora is None else max(4 * SLICE_VALUES // row_set.lora.rank, 1)
    begin = 0
    while begin < len(ids):
        end = min(begin + step, int(np.searchsorted(ids, ids[begin] + span)))
        yield ids[begin:end]
        begin = end


def _values(row_set: RowSet, ids: Int32Array, source: BinaryIO) -> Float32Array:
    """The rows, float32 [len(ids), width]."""
    tensors, own = row_set.tensors, row_set.own.weight
    values = np.zeros((len(ids), row_set.width), dtype=np.float32)
    trained = {token_id: index for index, token_id in enumerate(tensors.delta_ids)}
    is_trained = np.isin(ids, np.array(tensors.delta_ids, dtype=np.int64)) & (tensors.delta is not None)
    others = np.flatnonzero(~is_trained)
    if len(others) and tensors.weight is not None:
        _read_runs(values, others, ids, source, tensors.weight)
    elif len(others):
        with own.path.open("rb") as base:
            _read_runs(values, others, ids, base, own)
    for at in np.flatnonzero(is_trained).tolist():
        assert tensors.delta is not None, "a token is trained"
        raw = read_rows(source, tensors.delta, trained[int(ids[at])], 1)
        values[at] = decode(raw, tensors.delta.dtype, (row_set.width,))
    return values


def _read_runs(values: Float32Array, others: Any, ids: Int32Array, file: BinaryIO, entry: Any) -> None:
    at = 0
    for first, count in runs(ids[others]):
        rows = decode(read_rows(file, entry, first, count), entry.dtype, (count, entry.shape[1]))
        values[others[at : at + count]] = rows
        at += count


def _lora_rows(row_set: RowSet, ids: Int32Array, source: BinaryIO) -> Float32Array:
    """What LoRA on the same module adds to these rows, float32 [len(ids), width]."""
    lora = row_set.lora
    assert lora is not None, "the caller checked"
    parts = {part.packed_name: entry for part, entry in lora.tensors}
    a, b = parts["a"], parts["b"]
    if lora.is_embedding:  # A [rank, tokens], B [width, rank]
        columns = _columns(source, a, int(ids[0]), int(ids[-1]) + 1)[:, ids - ids[0]]
        rows = columns.T @ _whole(source, b).T
    else:  # A [rank, width], B [tokens, rank]
        first, last = int(ids[0]), int(ids[-1]) + 1
        block = decode(read_rows(source, b, first, last - first), b.dtype, (last - first, b.shape[1]))
        rows = block[ids - first] @ _whole(source, a)
    return np.asarray(rows * np.float32(lora.scaling), dtype=np.float32)


def _whole(source: BinaryIO, entry: TensorEntry) -> Float32Array:
    return decode(read_rows(source, entry, 0, entry.shape[0]), entry.dtype, entry.shape)


def _columns(source: BinaryIO, entry: TensorEntry, begin: int, end: int) -> Float32Array:
    size, rows = ITEMSIZE[entry.dtype], []
    for row in range(entry.shape[0]):
        source.seek(entry.start + (row * entry.shape[1] + begin) * size)
        rows.append(decode(source.read((end - begin) * size), entry.dtype, (end - begin,)))
    return np.stack(rows)


def _bias_bytes(row_set: RowSet, ids: Int32Array, rows: ReplacedRows) -> Iterator[bytes]:
    """The biases of the rows: the file's, else the base model's; and that of lora_B, scaled."""
    tensors, own = row_set.tensors, row_set.own.bias
    values = np.zeros(len(ids), dtype=np.float32)
    if tensors.bias is not None:
        values += _whole(rows.file, tensors.bias)[ids]
    elif own is not None:
        with own.path.open("rb") as base:
            whole = decode(read_rows(base, own, 0, own.shape[0]), own.dtype, own.shape)
        is_known = ids < len(whole)
        values[is_known] += whole[ids[is_known]]
    if row_set.lora is not None:
        added = {part.packed_name: entry for part, entry in row_set.lora.tensors}.get("bias")
        if added is not None:
            values += np.float32(row_set.lora.scaling) * _whole(rows.lora_file, added)[ids]
    yield served_values(values, f"{row_set.name}.bias", "float32")
