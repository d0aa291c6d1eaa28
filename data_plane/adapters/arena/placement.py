"""Where the parts of one adapter lie among its pages: A and B of every module, then the rows of embedding and head,
then all vectors side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from data_plane.adapters.arena.pages import PagePool
from data_plane.adapters.arena.placed_head import PlacedHead
from data_plane.adapters.arena.row_tables import OUTER_KINDS, RowPages, row_width
from data_plane.adapters.arena.slots import ModulePages
from data_plane.adapters.format.manifest import Manifest, ModuleEntry, RowsEntry
from data_plane.errors import AdapterMismatch
from data_plane.plan import TargetKind, TargetModule
from kernels.lora import PAGE_RANKS


@dataclass(frozen=True, slots=True)
class Placement:
    """Indices count within the adapter's own pages."""

    modules: dict[str, ModulePages]  # by target module name
    num_values: int  # float32 values of all vectors
    num_matrix_pages: int  # the vectors follow
    num_pages: int
    rows: Mapping[str, RowPages] = field(default_factory=dict)  # of embedding and head, by target module name
    head: PlacedHead | None = None


def place(manifest: Manifest, targets: Mapping[str, TargetModule], pool: PagePool) -> Placement:
    """Place every module of the manifest. Raises AdapterMismatch for a module that differs from the model's."""
    modules: dict[str, ModulePages] = {}
    first = num_values = 0
    for module in (module for chunk in manifest.chunks for module in chunk.modules):
        _check(module, targets.get(module.name), manifest.digest)
        num_a_pages = pool.num_pages_of(module.rank, module.in_features)
        num_b_pages = pool.num_pages_of(module.rank, module.out_features)
        vectors: dict[str, int] = {}
        for table in module.kind.tables:
            vectors[table] = num_values
            num_values += module.out_features
        modules[module.name] = ModulePages(module.rank, module.scaling, first, num_a_pages, num_b_pages, vectors)
        first += num_a_pages + num_b_pages
    rows: dict[str, RowPages] = {}
    for name, entry in _whole_rows(manifest, targets).items():
        bias = num_values + entry.num_rows if entry.has_bias else None
        rows[name] = RowPages(entry.num_rows, first, num_values, bias)
        first += pool.num_pages_of(entry.num_rows, entry.width)
        num_values += entry.size.num_values
    head = None
    if manifest.head is not None:
        head = PlacedHead(manifest.head, num_values)
        num_values += manifest.head.num_values
    heads = {name for name, target in targets.items() if target.kind is TargetKind.HEAD}
    if manifest.page_columns not in (None, manifest.own_page_columns(heads)):
        raise AdapterMismatch(
            f"adapter {manifest.digest}: page_columns is {manifest.page_columns}, its modules need "
            f"{manifest.own_page_columns(heads)}"
        )
    arena_bytes = manifest.arena_bytes(heads)
    assert arena_bytes % pool.page_bytes == 0, "the columns of a page divide all widths that whole pages are made for"
    num_pages = arena_bytes // pool.page_bytes
    assert first + -(-num_values // pool.values_per_page) <= num_pages, (
        "an adapter needs more pages than its arena bytes"
    )
    return Placement(modules, num_values, first, num_pages, rows, head)


def _whole_rows(manifest: Manifest, targets: Mapping[str, TargetModule]) -> dict[str, RowsEntry]:
    """The rows of every module with those of all chunks as one. Raises AdapterMismatch for what the model has not."""
    whole: dict[str, RowsEntry] = {}
    for entry in (entry for chunk in manifest.chunks for entry in chunk.rows):
        before, target = whole.get(entry.name), targets.get(entry.name)
        where = f"adapter {manifest.digest}: rows of {entry.name}"
        if target is None or target.kind not in OUTER_KINDS:
            raise AdapterMismatch(f"{where}: the model has no embedding or head of that name for adapters")
        if entry.width != row_width(target) or (entry.has_bias and target.kind is TargetKind.EMBEDDING):
            raise AdapterMismatch(f"{where}: have {entry.width} values, the model's have {row_width(target)}")
        if before is not None and (before.num_rows % PAGE_RANKS or before.has_bias != entry.has_bias):
            raise AdapterMismatch(f"{where}: are cut at {before.num_rows}, no multiple of {PAGE_RANKS}, or differ")
        num_before = 0 if before is None else before.num_rows
        whole[entry.name] = RowsEntry(entry.name, num_before + entry.num_rows, entry.width, entry.has_bias)
    if manifest.num_tokens is not None:
        _check_new_tokens(manifest, manifest.num_tokens, whole, targets)
    return whole


def _check_new_tokens(
    manifest: Manifest, num_tokens: int, whole: Mapping[str, RowsEntry], targets: Mapping[str, TargetModule]
) -> None:
    """Refuse new tokens without rows. The writer compares the ids."""
    outer = {target.kind: target for target in targets.values() if target.kind in OUTER_KINDS}
    embedding, head = outer.get(TargetKind.EMBEDDING), outer.get(TargetKind.HEAD)
    if embedding is None or head is None or embedding.in_features != head.out_features:
        raise AdapterMismatch(f"adapter {manifest.digest}: the model's vocabulary cannot be changed")
    num_new = num_tokens - head.out_features
    for name in (embedding.name, head.name) if num_new > 0 else ():
        if name not in whole or whole[name].num_rows < num_new:
            raise AdapterMismatch(f"adapter {manifest.digest}: {num_new} new tokens have no rows of {name}")


def _check(module: ModuleEntry, target: TargetModule | None, digest: str) -> None:
    if target is None:
        raise AdapterMismatch(f"adapter {digest}: the model has no linear or embedding {module.name} for adapters")
    if module.is_embedding != (target.kind is TargetKind.EMBEDDING):
        flag, kind = module.is_embedding, target.kind.value
        raise AdapterMismatch(f"adapter {digest}: {module.name} is_embedding is {flag}, the model has it as {kind}")
    expected, got = (target.in_features, target.out_features), (module.in_features, module.out_features)
    if expected != got:
        raise AdapterMismatch(f"adapter {digest}: {module.name} is (in, out) {got}, the model's is {expected}")
