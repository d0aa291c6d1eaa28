"""Loads that fail leave the slot empty and every byte free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from data_plane.errors import (
    AdapterCorrupt,
    AdapterLoadError,
    AdapterMismatch,
    AdapterUnavailable,
)
from data_plane.plan import TargetKind, TargetModule
from tests.data_plane.adapters.factories import (
    DictSource,
    Packed,
    RandomBase,
    assert_nothing_left,
    load,
    make_arena,
    pack,
)


def changed(packed: Packed, *, manifest: bytes | None = None, chunks: list[bytes] | None = None) -> DictSource:
    """A source that gives other bytes under the same digest."""
    return DictSource(
        {
            packed.digest: Packed(
                packed.digest,
                packed.manifest if manifest is None else manifest,
                packed.chunks if chunks is None else chunks,
                packed.weights,
            )
        }
    )


def flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


@pytest.mark.parametrize("where", ["header", "first weight", "last weight"])
def test_corrupt_chunk_leaves_the_slot_empty(where: str) -> None:
    packed = pack(8)
    chunk = packed.chunks[1]
    position = {"header": 20, "first weight": 8 + int.from_bytes(chunk[:8], "little"), "last weight": len(chunk) - 1}
    arena = make_arena()
    with pytest.raises(AdapterCorrupt):
        arena.load(0, 1, packed.digest, changed(packed, chunks=[packed.chunks[0], flipped(chunk, position[where])]))
    assert_nothing_left(arena)


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_truncated_manifest_is_corrupt(keep: int) -> None:
    packed = pack(8)
    arena = make_arena()
    with pytest.raises(AdapterCorrupt, match="its manifest hashes to"):
        arena.load(0, 1, packed.digest, changed(packed, manifest=packed.manifest[:keep]))
    assert_nothing_left(arena)


def test_source_that_ends_early_is_unavailable() -> None:
    packed = pack(8)
    arena = make_arena()
    with pytest.raises(AdapterUnavailable, match=r"before chunk layers\.1"):
        arena.load(0, 1, packed.digest, changed(packed, chunks=packed.chunks[:1]))
    with pytest.raises(AdapterUnavailable, match="is nowhere"):
        arena.load(0, 1, packed.digest, DictSource())
    assert_nothing_left(arena)


def test_chunks_in_another_order_are_corrupt() -> None:
    packed = pack(8)
    arena = make_arena()
    with pytest.raises(AdapterCorrupt, match=r"chunk layers\.0 hashes to"):
        arena.load(0, 1, packed.digest, changed(packed, chunks=packed.chunks[::-1]))
    assert_nothing_left(arena)


def test_chunks_whose_tensors_are_not_the_manifests_are_corrupt() -> None:
    """Names, shapes and types are checked beside the hash: here by a source that verifies nothing."""

    class Unverified(DictSource):
        def open(self, digest: str) -> tuple[bytes, Iterator[bytes]]:
            return self.adapters[digest].manifest, iter(self.adapters[digest].chunks)

    arena = make_arena()
    for version, reason in (
        (1, r"want torch\.float32 \(8, "),
        (2, r"pages is .*\[44, 8, 16\].*, want .*\[22, 8, 16\]"),
    ):
        packed = pack(8, version=version)
        swapped = packed.chunks[::-1] if version == 1 else pack(8, vectors="bias").chunks
        for chunks, why in ((swapped, "missing or too many"), (pack(9, version=version).chunks, reason)):
            source = Unverified({packed.digest: replace(packed, chunks=chunks)})
            with pytest.raises(AdapterCorrupt, match=why):
                arena.load(0, 1, packed.digest, source)
    assert_nothing_left(arena)


def test_source_that_breaks_in_an_unforeseen_way_leaves_the_slot_empty() -> None:
    class Broken:
        def open(self, digest: str) -> tuple[bytes, Iterator[bytes]]:
            raise KeyError("surprise")

    arena = make_arena()
    with pytest.raises(AdapterLoadError, match="KeyError"):
        arena.load(0, 1, "0" * 64, Broken())
    assert_nothing_left(arena)


def test_a_cancelled_load_stops_within_a_chunk() -> None:
    """The slot is emptied while the first DoRA scales are computed; the layer's other modules are left."""
    read: list[str] = []

    class EmptiesTheSlot(RandomBase):
        def weight(self, target_name: str) -> torch.Tensor:
            read.append(target_name)
            arena.evict(0, 1)
            return super().weight(target_name)

    arena = make_arena(base=EmptiesTheSlot())
    with pytest.raises(AdapterLoadError, match="was cancelled"):
        load(arena, 0, 1, pack(8, vectors="magnitude"))
    assert len(read) == 1
    assert_nothing_left(arena)


def test_wrong_fingerprint_names_both() -> None:
    packed = pack(8, base="c" * 64)
    arena = make_arena()
    with pytest.raises(AdapterMismatch, match=r"c{64}.*b{64}"):
        load(arena, 0, 1, packed)
    assert_nothing_left(arena)


def test_wrong_dtype_is_a_mismatch() -> None:
    arena = make_arena()
    with pytest.raises(AdapterMismatch, match="dtype is bfloat16"):
        load(arena, 0, 1, pack(8, dtype=torch.bfloat16))
    assert_nothing_left(arena)


def test_unknown_module_is_named() -> None:
    arena = make_arena()
    with pytest.raises(AdapterMismatch, match=r"no linear or embedding model\.layers\.0\.gate"):
        load(arena, 0, 1, pack(8, targets=[TargetModule("model.layers.0.gate", TargetKind.LINEAR, 32, 48)]))
    assert_nothing_left(arena)


def test_wrong_shape_names_module_expected_and_got() -> None:
    arena = make_arena()
    with pytest.raises(
        AdapterMismatch, match=r"model\.layers\.0\.q is \(in, out\) \(32, 32\), the model's is \(32, 48\)"
    ):
        load(arena, 0, 1, pack(8, targets=[TargetModule("model.layers.0.q", TargetKind.LINEAR, 32, 32)]))
    assert_nothing_left(arena)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weight_that_is_not_finite_is_refused(value: float) -> None:
    poisoned = pack(8, edit=lambda a, b: b[-1].fill_(value))
    arena = make_arena()
    with pytest.raises(AdapterMismatch, match="not finite"):
        load(arena, 0, 1, poisoned)
    assert_nothing_left(arena)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 3}, "format is 3"),
        ({"format": True}, "format is True"),
        ({"kind": "loha"}, "kind is 'loha'"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"extra": 1}, "'extra'"),
        ({"chunks": {}}, "chunks is dict"),
        ({"chunks": [{}]}, "of a chunk are missing"),
        ({"base_fingerprint": "abc"}, "64 lower-case"),
    ],
)
def test_manifest_that_breaks_the_format_is_corrupt(changes: dict[str, object], message: str) -> None:
    arena = make_arena()
    with pytest.raises(AdapterCorrupt, match=message):
        load(arena, 0, 1, pack(8, changes=changes))
    assert_nothing_left(arena)
