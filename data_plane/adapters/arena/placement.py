"""Where the parts of one adapter lie among its pages: A and B of every module, then all vectors side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from data_plane.adapters.arena.pages import PagePool
from data_plane.adapters.arena.slots import ModulePages
from data_plane.adapters.format.manifest import Manifest, ModuleEntry
from data_plane.errors import AdapterMismatch
from data_plane.plan import TargetKind, TargetModule


@dataclass(frozen=True, slots=True)
class Placement:
    """Indices count within the adapter's own pages."""

    modules: dict[str, ModulePages]  # by target module name
    num_values: int  # float32 values of all vectors
    num_matrix_pages: int  # the vectors follow
    num_pages: int


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
    arena_bytes = manifest.arena_bytes({name for name, target in targets.items() if target.kind is TargetKind.HEAD})
    assert arena_bytes % pool.page_bytes == 0, "the columns of a page divide all widths that whole pages are made for"
    num_pages = arena_bytes // pool.page_bytes
    assert first + -(-num_values // pool.values_per_page) <= num_pages, (
        "an adapter needs more pages than its arena bytes"
    )
    return Placement(modules, num_values, first, num_pages)


def _check(module: ModuleEntry, target: TargetModule | None, digest: str) -> None:
    if target is None:
        raise AdapterMismatch(f"adapter {digest}: the model has no linear or embedding {module.name} for adapters")
    if module.is_embedding != (target.kind is TargetKind.EMBEDDING):
        flag, kind = module.is_embedding, target.kind.value
        raise AdapterMismatch(f"adapter {digest}: {module.name} is_embedding is {flag}, the model has it as {kind}")
    expected, got = (target.in_features, target.out_features), (module.in_features, module.out_features)
    if expected != got:
        raise AdapterMismatch(f"adapter {digest}: {module.name} is (in, out) {got}, the model's is {expected}")
