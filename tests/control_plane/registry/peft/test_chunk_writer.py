"""Writing a chunk a few values at a time gives the same bytes, and takes little memory."""

from __future__ import annotations

import hashlib
import io
import json
import tracemalloc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, strategies as st

from control_plane.errors import InvalidAdapter
from control_plane.registry.peft.chunks import chunk_writer
from control_plane.registry.peft.chunks.chunk_writer import (
    ChunkTensor,
    PackedTensor,
    WrittenChunk,
    begin_chunk,
    write_chunk,
)
from control_plane.registry.peft.chunks.paged_tensor import PagedMatrix, PagedTensor
from control_plane.registry.peft.chunks.tensor_sources import FileSource
from control_plane.registry.peft.safetensors_header import TensorEntry
from tests.paged_chunks import from_pages


def entry(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]], start: int) -> TensorEntry:
    return TensorEntry("t", "F32", values.shape, start, values.nbytes)


def written(tensors: Sequence[ChunkTensor], source: bytes) -> tuple[WrittenChunk, bytes]:
    out = io.BytesIO()
    result = write_chunk(out, FileSource(io.BytesIO(source)), tensors, lambda: None)
    return result, out.getvalue()


@given(
    st.integers(1, 40), st.integers(1, 40), st.booleans(), st.sampled_from(["float32", "bfloat16"]), st.integers(1, 50)
)
def test_slices_of_any_size_give_the_same_bytes(
    num_rows: int, num_columns: int, is_transposed: bool, dtype: str, slice_values: int
) -> None:
    values = np.random.default_rng(num_rows).standard_normal((num_rows, num_columns)).astype("<f4")
    vector = values[:, 0].copy()
    source = b"head" + values.tobytes() + vector.tobytes()
    tensors = [
        PackedTensor("x.a", entry(values, 4), dtype, is_transposed),
        PackedTensor("x.bias", entry(vector, 4 + values.nbytes), "float32"),
    ]
    whole = written(tensors, source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_writer, "SLICE_VALUES", slice_values)
        patch.setattr(chunk_writer, "HASHED_BYTES", 7)
        assert written(tensors, source) == whole
    result, data = whole
    head_size = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:head_size])
    assert result.sha256 == hashlib.sha256(data).hexdigest() and result.size_bytes == len(data)
    if dtype == "float32":
        begin, end = header["x.a"]["data_offsets"]
        expected = values.T if is_transposed else values
        assert data[head_size + begin : head_size + end] == np.ascontiguousarray(expected).tobytes()
        assert header["x.a"]["shape"] == list(expected.shape)


@pytest.mark.parametrize("shape", [(4, 1 << 20), (1 << 20, 4), (2048, 2048)], ids=["wide", "tall", "square"])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_large_tensor_is_never_in_memory_as_a_whole(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], is_transposed: bool
) -> None:
    """16 MB of values in slices of 16 384: what is held at any time is a few slices."""
    monkeypatch.setattr(chunk_writer, "SLICE_VALUES", 1 << 14)
    monkeypatch.setattr(chunk_writer, "HASHED_BYTES", 1 << 16)
    with open(f"{tmp_path}/in", "w+b") as source, open(f"{tmp_path}/out", "x+b") as out:  # noqa: PTH123
        source.truncate(4 * shape[0] * shape[1])
        tensor = PackedTensor(
            "x.b", TensorEntry("t", "F32", shape, 0, 4 * shape[0] * shape[1]), "bfloat16", is_transposed
        )
        tracemalloc.start()
        try:
            write_chunk(out, FileSource(source), [tensor], lambda: None)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak_bytes < 32 * (1 << 14) + (1 << 18)


def test_work_that_nobody_waits_for_ends_within_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_writer, "SLICE_VALUES", 16)
    values = np.zeros((8, 16), "<f4")
    num_checks = 0

    def check() -> None:
        nonlocal num_checks
        num_checks += 1
        if num_checks == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        write_chunk(
            io.BytesIO(),
            FileSource(io.BytesIO(values.tobytes())),
            [PackedTensor("x.a", entry(values, 0), "float32")],
            check,
        )
    assert num_checks == 3


@pytest.mark.parametrize("place", [0, 100, 255])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_one_bad_value_anywhere_is_found(monkeypatch: pytest.MonkeyPatch, place: int, is_transposed: bool) -> None:
    monkeypatch.setattr(chunk_writer, "SLICE_VALUES", 32)
    for value, words in ((np.nan, "NaN"), (1e6, "too large for float16")):
        values = np.zeros((16, 16), "<f4")
        values.flat[place] = value
        tensor = PackedTensor("x.a", entry(values, 0), "float16", is_transposed)
        with pytest.raises(InvalidAdapter, match=words):
            written([tensor], values.tobytes())


def test_a_file_that_becomes_shorter_is_reported() -> None:
    values = np.zeros((16, 16), "<f4")
    with pytest.raises(InvalidAdapter, match="became shorter"):
        written([PackedTensor("x.a", entry(values, 0), "float32")], values.tobytes()[:-1])


def test_hashes_of_another_thread_are_those_of_the_whole_chunk(tmp_path: Path) -> None:
    values = np.random.default_rng(3).standard_normal((9, 7)).astype("<f4")
    source, tensors = values.tobytes(), [PackedTensor("x.a", entry(values, 0), "bfloat16", is_transposed=True)]
    chunk = FileSource(io.BytesIO(source))
    with ThreadPoolExecutor(1) as hashing:
        future = begin_chunk(tmp_path / "0", chunk, tensors, lambda: None, hashing)
        assert (future.result(), (tmp_path / "0").read_bytes()) == written(tensors, source)


def test_a_chunk_that_cannot_be_served_is_refused_before_its_hashes(tmp_path: Path) -> None:
    values = np.full((2, 2), np.nan, "<f4")
    tensors = [PackedTensor("x.a", entry(values, 0), "float32")]
    with ThreadPoolExecutor(1) as hashing, pytest.raises(InvalidAdapter, match="NaN"):
        begin_chunk(tmp_path / "0", FileSource(io.BytesIO(values.tobytes())), tensors, lambda: None, hashing)


def test_work_that_is_ended_ends_while_hashes_are_computed(tmp_path: Path) -> None:
    values = np.zeros((2, 2), "<f4")
    num_checks = 0

    def check() -> None:
        nonlocal num_checks
        num_checks += 1
        if num_checks > 1:  # the first one is that of writing
            raise TimeoutError

    tensors = [PackedTensor("x.a", entry(values, 0), "float32")]
    with ThreadPoolExecutor(1) as hashing:
        future = begin_chunk(tmp_path / "0", FileSource(io.BytesIO(values.tobytes())), tensors, check, hashing)
        with pytest.raises(TimeoutError):
            future.result()


@given(
    st.integers(1, 20), st.integers(1, 20), st.booleans(), st.sampled_from(["float32", "bfloat16"]), st.integers(1, 200)
)
def test_slices_of_any_size_give_the_same_pages(
    rank: int, width: int, is_transposed: bool, dtype: str, slice_values: int
) -> None:
    """In any type: the values of one are those of the other, where both can have them."""
    matrix = np.random.default_rng(rank).integers(-9, 9, (rank, width)).astype("<f4")
    stored = np.ascontiguousarray(matrix.T) if is_transposed else matrix
    bits = (stored.view(np.uint32) >> 16).astype("<u2")
    zeros = PagedMatrix(None, 3, 10)
    results = []
    for raw, kind in ((stored, "F32"), (bits, "BF16")):
        tensor = TensorEntry("t", kind, stored.shape, 0, raw.nbytes)
        pages = PagedTensor([zeros, PagedMatrix(tensor, rank, width, is_transposed)], 5, dtype)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chunk_writer, "SLICE_VALUES", slice_values)
            results.append(written([pages], raw.tobytes()))
    assert results[0] == results[1]
    found = list(safetensors.torch.load(results[0][1])["pages"])
    assert not torch.stack(found[:2]).any()
    assert np.array_equal(from_pages([page.float() for page in found[2:]], rank, width).numpy(), matrix)


def test_all_matrices_with_values_that_cannot_be_served_are_reported() -> None:
    values = np.full((16, 8), np.nan, "<f4")
    matrices = [PagedMatrix(TensorEntry(name, "F32", (8, 8), 0, 256), 8, 8) for name in ("one", "other")]
    with pytest.raises(InvalidAdapter) as refusal:
        written([PagedTensor(matrices, 8, "float32")], values.tobytes())
    assert [violation.field for violation in refusal.value.violations] == ["one", "other"]
