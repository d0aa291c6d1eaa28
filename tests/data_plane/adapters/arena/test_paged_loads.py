"""Loads of chunks in pages: one hash and one copy for each chunk, and the same arena as chunks of format 1 give."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from data_plane.adapters.arena.pages import PagePool
from data_plane.adapters.format.manifest import read_manifest
from data_plane.adapters.format.packed import read_chunk
from data_plane.errors import AdapterCorrupt, AdapterMismatch
from data_plane.plan import TargetKind, TargetModule
from tests.data_plane.adapters.factories import (
    TARGETS,
    Packed,
    assert_nothing_left,
    load,
    make_arena,
    pack,
    run_step,
    sha256,
)
from tests.paged_chunks import to_pages, write_chunk

NAMES = [target.name for target in TARGETS]
# Pages of TARGETS have 16 columns, those of an adapter on one of these 32 or 64; 4 outputs do not narrow them.
WIDE = tuple(
    TargetModule(f"model.layers.0.{name}", TargetKind.LINEAR, *sizes)
    for name, sizes in (("o", (32, 64)), ("square", (64, 64)), ("router", (64, 4)))
)


def loaded(packed: Packed) -> torch.Tensor:
    """The pages of an adapter after its load."""
    arena = make_arena(targets=TARGETS + WIDE)
    load(arena, 0, 1, packed)
    return arena.table.pages[torch.from_numpy(arena.page_ids(0))]


@pytest.mark.parametrize("vectors", ["", "bias", "magnitude"])
@pytest.mark.parametrize("ranks", [8, 5, 20, {NAMES[1]: 3, NAMES[4]: 9}])
def test_both_formats_leave_the_same_pages(ranks: Any, vectors: str) -> None:
    old, new = (pack(ranks, vectors=vectors, version=version) for version in (1, 2))
    assert old.digest != new.digest
    assert torch.equal(loaded(old), loaded(new))


@pytest.mark.parametrize("names", [["o"], ["square"], ["o", "square"]])
@pytest.mark.parametrize("rank", [3, 17])
def test_wider_pages_are_cut_to_those_of_the_arena(names: list[str], rank: int) -> None:
    ranks = {f"model.layers.0.{name}": rank for name in names}
    old, new = (pack(ranks, targets=WIDE, version=version) for version in (1, 2))
    assert torch.equal(loaded(old), loaded(new))


@pytest.mark.parametrize("rank", [3, 17])
def test_pages_that_this_arena_does_not_need_are_left_out(rank: int) -> None:
    """A router's 4 outputs take a page of 64 columns in the chunk, and one of 16 in the arena."""
    square, router = WIDE[1:]
    ranks = {square.name: rank, router.name: rank}
    old, new = (pack(ranks, targets=WIDE, version=version) for version in (1, 2))
    pages = [page for module in sorted(ranks) for part in new.weights[module][:2] for page in to_pages(part, 64)]
    assert new.chunks == [write_chunk(pages, {})]
    assert torch.equal(loaded(old), loaded(new))


def test_a_load_is_one_hash_and_one_copy_for_each_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    copied: list[int] = []
    compute, write_pages = hashlib.sha256, PagePool.write_pages

    def counted(data: bytes = b"", **options: Any) -> Any:
        hashed.append(len(data))
        return compute(data, **options)

    def counted_copy(pool: PagePool, page_ids: Any, pages: Any, ring: Any) -> bool:
        copied.append(len(page_ids))
        return write_pages(pool, page_ids, pages, ring)

    def forbidden(*_arguments: Any) -> None:
        raise AssertionError("a matrix is copied on its own")

    packed, arena = pack(16), make_arena()
    monkeypatch.setattr(hashlib, "sha256", counted)
    monkeypatch.setattr(PagePool, "write_pages", counted_copy)
    monkeypatch.setattr(PagePool, "write", forbidden)
    load(arena, 0, 1, packed)
    chunks = [len(chunk) for chunk in packed.chunks]
    # The source of the tests reads the manifest once for itself.
    assert hashed == [len(packed.manifest)] * 2 + chunks
    assert sum(copied) == len(arena.page_ids(0)) and len(copied) == len(chunks) == 2
    monkeypatch.undo()
    run_step(arena, [0, -1, 0], {0: packed})


def test_pages_that_lie_apart_are_filled() -> None:
    """Two adapters left holes; the third one's pages are in both."""
    small, large = [pack(8, seed=seed) for seed in range(4)], pack(16, seed=9)
    arena = make_arena(arena_bytes=4 * small[0].arena_bytes)
    for slot, packed in enumerate(small):
        load(arena, slot, 1, packed)
    for slot in (0, 2):
        arena.evict(slot, 1)
    load(arena, 0, 2, large)
    run_step(arena, [0, 1, -1, 3, 0], {0: large, 1: small[1], 3: small[3]})


def test_the_tensors_of_a_module_are_read_from_its_pages() -> None:
    packed = pack(5, vectors="magnitude")
    manifest = read_manifest(packed.manifest, packed.digest)
    for chunk, data in zip(manifest.chunks, packed.chunks, strict=True):
        for module, tensors in read_chunk(manifest, chunk, data):
            a, b, _ = packed.weights[module.name]
            assert torch.equal(tensors["a"], a) and torch.equal(tensors["b"], b)
            assert torch.equal(tensors["magnitude"], packed.vectors[module.name])


def remade(packed: Packed, chunk: bytes) -> Packed:
    """The adapter with another first chunk, whose hash its manifest has."""
    manifest = packed.manifest.replace(sha256(packed.chunks[0]).encode(), sha256(chunk).encode())
    size = f'"size_bytes":{len(packed.chunks[0])}'.encode()
    manifest = manifest.replace(size, f'"size_bytes":{len(chunk)}'.encode())
    return replace(packed, digest=sha256(manifest), manifest=manifest, chunks=[chunk, *packed.chunks[1:]])


def one(rank: int = 5, value: float = 0.0, row: int = 7) -> tuple[Packed, list[torch.Tensor]]:
    """An adapter on one module, and its pages with `value` in a row of each."""
    packed = pack({NAMES[0]: rank})
    a, b, _ = packed.weights[NAMES[0]]
    pages = to_pages(a, 16) + to_pages(b, 16)
    for page in pages:
        page[row, 3] = value
    return packed, pages


@pytest.mark.parametrize(
    ("value", "row", "error", "message"),
    [
        (1.0, 7, AdapterCorrupt, r"q has values beyond its rank or its width"),
        (float("nan"), 2, AdapterMismatch, r"layers\.0\.q\.a holds a value that is not finite"),
    ],
)
def test_pages_with_wrong_values_are_refused(value: float, row: int, error: type[Exception], message: str) -> None:
    packed, pages = one(value=value, row=row)
    arena = make_arena()
    with pytest.raises(error, match=message):
        load(arena, 0, 1, remade(packed, write_chunk(pages, {})))
    assert_nothing_left(arena)


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (b"", "no header of safetensors|is not JSON"),
        (b"\xff" * 64, "no header of safetensors"),
        ((9).to_bytes(8, "little") + b"[1,2,3,4]", "no header of safetensors"),
        ((4).to_bytes(8, "little") + b"{{{{", "is not JSON"),
        (write_chunk([torch.zeros(8, 16)], {}), r"pages is .*\[1, 8, 16\].*want .*\[5, 8, 16\]"),
        (write_chunk([torch.zeros(8, 16)] * 5, {"other": torch.zeros(1)}), "'other'. are missing or too many"),
        (write_chunk([torch.zeros(8, 16, dtype=torch.float16)] * 5, {}), "'F16'.*want .*'F32'"),
        (write_chunk([torch.zeros(8, 16)] * 5, {}) + b"\0", r"has \d+ bytes, its tensors end at"),
    ],
)
def test_chunks_that_are_not_their_manifests_are_corrupt(chunk: bytes, message: str) -> None:
    arena = make_arena()
    with pytest.raises(AdapterCorrupt, match=message):
        load(arena, 0, 1, remade(one()[0], chunk or b"\0" * 8))
    assert_nothing_left(arena)


@pytest.mark.parametrize("columns", [8, 32, 0, "16"])
def test_other_columns_than_the_modules_need_are_refused(columns: object) -> None:
    arena = make_arena()
    with pytest.raises((AdapterMismatch, AdapterCorrupt), match="page_columns is"):
        load(arena, 0, 1, pack(8, changes={"page_columns": columns}))
    assert_nothing_left(arena)
