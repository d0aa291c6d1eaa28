"""Reads chunks whose matrices lie in pages (docs/protocol.md), without copying them. Does not trust its input."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from contract.packed_layout import ITEMSIZE, PAGES, RANKS_PER_PAGE, num_pages_of
from data_plane.adapters.format.manifest import ChunkEntry, Manifest, ModuleEntry
from data_plane.errors import AdapterCorrupt, AdapterMismatch
from data_plane.plan import ChunkBytes

_HEADER_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
BITS: dict[int, np.dtype[Any]] = {
    4: np.dtype("<i4"),
    2: np.dtype("<i2"),
}  # how values are held here, by their bytes: numpy has no bfloat16

Bits = npt.NDArray[Any]  # of BITS


@dataclass(frozen=True, slots=True)
class MatrixPages:
    """The pages of one matrix within its chunk."""

    first: int
    num_pages: int
    rank: int
    width: int


@dataclass(frozen=True, slots=True)
class PagedModule:
    """One module of a chunk."""

    entry: ModuleEntry
    a: MatrixPages
    b: MatrixPages


@dataclass(frozen=True, slots=True)
class PagedChunk:
    """The modules of one chunk. The arrays are views of its bytes."""

    modules: tuple[PagedModule, ...]
    pages: Bits  # [num_pages, RANKS_PER_PAGE, columns]
    vectors: Mapping[str, npt.NDArray[np.float32]]  # by tensor name

    def matrix(self, part: MatrixPages) -> Bits:
        """A copy [rank, width] of one matrix."""
        columns = self.pages.shape[2]
        tiles = -(-part.width // columns)
        own = self.pages[part.first : part.first + part.num_pages].reshape(-1, tiles, RANKS_PER_PAGE, columns)
        joined = own.transpose(0, 2, 1, 3).reshape(-1, tiles * columns)
        return np.array(joined[: part.rank, : part.width], order="C")


def read_paged(manifest: Manifest, chunk: ChunkEntry, data: ChunkBytes) -> PagedChunk:
    """The modules of a chunk. The source has verified its bytes (verify_chunk), so that no tensor is hashed.

    Raises AdapterCorrupt, or AdapterMismatch for a vector that is not finite. Values of pages are not looked at, but
    for those that must be zero.
    """
    assert manifest.page_columns is not None, "chunks of format 1 have no pages"
    where, columns = f"adapter {manifest.digest}: chunk {chunk.name}", manifest.page_columns
    modules = tuple(_placed(chunk.modules, columns))
    num_pages = sum(part.num_pages for module in modules for part in (module.a, module.b))
    itemsize = ITEMSIZE[manifest.dtype]
    wanted: dict[str, tuple[str, list[int], int]] = {}
    wanted[PAGES] = (_HEADER_DTYPES[manifest.dtype], [num_pages, RANKS_PER_PAGE, columns], itemsize)
    for module in chunk.modules:
        for part in module.kind.parts:
            if part.is_vector:
                wanted[f"{module.name}.{part.name}"] = ("F32", list(part.shape(module)), 4)
    places = _places(data, wanted, where)
    pages = np.frombuffer(data, BITS[itemsize], num_pages * RANKS_PER_PAGE * columns, places.pop(PAGES))
    vectors = {}
    for name, begin in places.items():
        vectors[name] = vector = np.frombuffer(data, "<f4", wanted[name][1][0], begin)
        if not np.isfinite(vector).all():
            raise AdapterMismatch(f"{where}: {name} holds a value that is not finite")
    read = PagedChunk(modules, pages.reshape(num_pages, RANKS_PER_PAGE, columns), vectors)
    for placed in modules:
        if any(_has_padding(read, part) for part in (placed.a, placed.b)):
            raise AdapterCorrupt(f"{where}: {placed.entry.name} has values beyond its rank or its width")
    return read


def _placed(entries: tuple[ModuleEntry, ...], columns: int) -> Iterator[PagedModule]:
    first = 0
    for entry in entries:
        parts = []
        for width in (entry.in_features, entry.out_features):
            parts.append(MatrixPages(first, num_pages_of(entry.rank, width, columns), entry.rank, width))
            first += parts[-1].num_pages
        yield PagedModule(entry, *parts)


def _places(data: ChunkBytes, wanted: Mapping[str, tuple[str, list[int], int]], where: str) -> dict[str, int]:
    """Where each tensor begins. Raises AdapterCorrupt unless the file has these tensors and nothing else."""
    head_bytes = 8 + int.from_bytes(data[:8], "little")
    try:
        header = json.loads(bytes(data[8:head_bytes])) if head_bytes <= len(data) else None
    except (ValueError, RecursionError) as error:
        raise AdapterCorrupt(f"{where}: its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise AdapterCorrupt(f"{where}: has no header of safetensors")
    if wrong := sorted(header.keys() ^ wanted.keys()):
        raise AdapterCorrupt(f"{where}: tensors {wrong[:4]} are missing or too many")
    places, end = {}, 0
    for name, (dtype, shape, itemsize) in wanted.items():
        size_bytes = itemsize * int(np.prod(shape, dtype=np.int64))
        entry = {"data_offsets": [end, end + size_bytes], "dtype": dtype, "shape": shape}
        if header[name] != entry:
            raise AdapterCorrupt(f"{where}: {name} is {str(header[name])[:200]}, want {entry}")
        places[name] = head_bytes + end
        end += size_bytes
    if head_bytes + end != len(data):
        raise AdapterCorrupt(f"{where}: has {len(data)} bytes, its tensors end at {head_bytes + end}")
    return places


def _has_padding(chunk: PagedChunk, part: MatrixPages) -> bool:
    """Whether there is anything but zeros beyond the matrix: a kernel multiplies it."""
    columns = chunk.pages.shape[2]
    tiles = -(-part.width // columns)
    own = chunk.pages[part.first : part.first + part.num_pages].reshape(-1, tiles, RANKS_PER_PAGE, columns)
    used_ranks, used_columns = part.rank % RANKS_PER_PAGE, part.width % columns
    below = bool(used_ranks) and bool(own[-1, :, used_ranks:].any())
    return below or (bool(used_columns) and bool(own[:, -1, :, used_columns:].any()))
