"""Slots: the adapter in each, the slot table on the device that kernels read, and the part of it that the host reads.

The table's tensors keep their addresses for the life of the arena, so that captured graphs may hold them. Only the
compute thread edits the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from data_plane.adapters.arena.pages import PagePool
from data_plane.adapters.arena.placed_head import PlacedHead
from data_plane.adapters.arena.rotary import RotaryTables
from data_plane.adapters.arena.row_tables import RowPages, RowTables
from data_plane.plan import TargetKind, TargetModule
from kernels.devices import put_number, upload_all
from kernels.lora import VECTOR_TABLES, Epilogue, ModuleGroup


@dataclass(frozen=True, slots=True)
class ModulePages:
    """Where one adapter's weights of one target module lie."""

    rank: int
    scaling: float
    first: int  # index of A's first page within the adapter's pages
    num_a_pages: int
    num_b_pages: int  # they follow A's
    vectors: Mapping[str, int] = field(default_factory=dict)  # by vector table: index within the adapter's vectors


@dataclass(frozen=True, slots=True)
class Columns:
    """One adapter's part of the slot table, a value for each target module, made on a loader thread.

    A mixture has ten thousand target modules and more, which the compute thread does not go through one by one.
    """

    rank: npt.NDArray[np.int32]  # 0: the adapter does not target the module
    scaling: npt.NDArray[np.float32]
    first: npt.NDArray[np.int32]  # index of A's first page within the adapter's pages
    vectors: Mapping[str, npt.NDArray[np.int64]]  # by vector table: index within the adapter's vectors; -1: none


@dataclass(frozen=True, slots=True)
class TablesThere:
    """What the slot table needs of an adapter, on the device: its load copies it, so that nobody else uploads any."""

    page_ids: torch.Tensor  # int32
    rank: torch.Tensor  # as in Columns
    scaling: torch.Tensor
    first: torch.Tensor
    vectors: Mapping[str, torch.Tensor]

    @property
    def all(self) -> tuple[torch.Tensor, ...]:
        """Every tensor."""
        return (self.page_ids, self.rank, self.scaling, self.first, *self.vectors.values())


@dataclass(frozen=True, slots=True, eq=False)
class ResidentAdapter:
    """An adapter in a slot; never changes after it is published."""

    slot: int
    generation: int
    digest: str
    page_ids: npt.NDArray[np.int64]
    columns: Columns
    there: TablesThere
    first_vector_page: int  # index within its pages: float32 vectors of all target modules, side by side
    head: PlacedHead | None  # its score head, among the vectors
    size_bytes: int  # of all its matrices and vectors without page rounding
    rotation: RotaryTables | None = None  # of its own; None: the model's
    rows: Mapping[str, RowPages] = field(default_factory=dict)  # of the embedding and the head, by target module name
    num_tokens: int | None = None  # of its own vocabulary; None: the base model's


class Load:
    """One load in progress. `is_cancelled` is set by the compute thread, read by the loader."""

    def __init__(self, slot: int, generation: int, digest: str) -> None:
        self.slot = slot
        self.generation = generation
        self.digest = digest
        self.is_cancelled = False


@dataclass(frozen=True, slots=True)
class ScaledColumn:
    """A column behind those of the slots: the adapter of a slot with another scaling, in the same pages."""

    column: int
    slot: int
    scale: float  # what the scaling is multiplied by
    is_linear: bool  # the column has the square root of the product's size (see kernels.lora.linear)


# Ids in the list of pages for each page of the pool. Adapters that come and go leave gaps between the rows of the list:
# with three quarters of it free, one of them is almost always wide enough for the next adapter.
ROOM = 4
ENTRY_BYTES = 4 + 4 + 4 + 8 * len(VECTOR_TABLES)  # of one module and column


def table_bytes(targets: Sequence[TargetModule], num_slots: int, num_scaled: int) -> int:
    """What the entries of a slot table take on the device."""
    num_experts = sum(target.kind is TargetKind.EXPERT for target in targets)
    return ENTRY_BYTES * (num_slots * len(targets) + num_scaled * (len(targets) - num_experts))


class SlotTable:
    """The slot table on the device: a column for each slot, then columns for adapters with a scale.

    Kernels know columns only, and call them slots. Modules of experts have the columns of the slots alone: an adapter
    on experts is not scaled, and a mixture has ten thousand such modules and more.
    """

    def __init__(self, targets: Sequence[TargetModule], num_slots: int, pool: PagePool, num_scaled: int = 0) -> None:
        """num_scaled: columns behind those of the slots."""
        device = pool.pages.device
        self._pool = pool
        self._targets = {target.name: index for index, target in enumerate(targets)}
        self.targets = tuple(targets)  # in the table's order
        self.num_slots = num_slots
        self.pages = pool.pages
        self.num_columns = num_columns = num_slots + num_scaled
        self.page_ids = torch.zeros(ROOM * pool.num_pages, dtype=torch.int32, device=device)
        # One entry for each module and column, module after module: those of a module begin at its index here.
        self._is_expert = np.array([target.kind is TargetKind.EXPERT for target in targets])
        widths = np.where(self._is_expert, num_slots, num_columns)
        self._begins = np.concatenate([[0], np.cumsum(widths)])
        self._on_device = torch.from_numpy(self._begins[:-1]).to(device)
        self._scalable = torch.from_numpy(self._begins[:-1][~self._is_expert]).to(device)
        num_entries = int(self._begins[-1])
        self._first = torch.zeros(num_entries, dtype=torch.int32, device=device)
        self._rank = torch.zeros(num_entries, dtype=torch.int32, device=device)
        self._scaling = torch.zeros(num_entries, dtype=torch.float32, device=device)
        # By vector table: where vectors begin, as kernels.lora.Epilogue counts; -1: none.
        self._vectors = {
            name: torch.full((num_entries,), -1, dtype=torch.int64, device=device) for name in VECTOR_TABLES
        }
        self.generation = torch.zeros(num_slots, dtype=torch.int64, device=device)  # 0: empty
        self.rows = RowTables(targets, num_slots, pool, self.page_ids)
        # On the host, by slot and target module: the ranks, and whether the module has a vector.
        self.host_rank = np.zeros((num_slots, len(targets)), dtype=np.int32)
        self.host_has_vectors = np.zeros((num_slots, len(targets)), dtype=np.bool_)
        self.slot_of_column = np.arange(num_columns, dtype=np.int32)  # of a column that is not used: any
        self.sign_of_column = np.ones(num_columns, dtype=np.float32)  # of the scale
        self.rotations: dict[int, RotaryTables] = {}  # of the slots whose adapter has its own
        self.num_compactions = 0
        self.version = 0  # rises with every column that is written or emptied
        self._scaled: dict[int, dict[int, ScaledColumn]] = {}  # by slot and column; no empty ones
        # Invariant: rows lie in page_ids without overlap; their lengths sum to at most the pool's number of pages.
        self._rows: dict[int, tuple[int, ResidentAdapter]] = {}  # slot -> (start in page_ids, adapter)

    def group(self, targets: Sequence[TargetModule]) -> tuple[ModuleGroup, Epilogue]:
        """Views for kernels of target modules that are neighbours in the table and read inputs of one width.

        The epilogue has all vector tables and no bias of the base.
        """
        indices = [self._targets[target.name] for target in targets]
        rows = slice(indices[0], indices[0] + len(indices))
        assert indices == list(range(rows.start, rows.stop)), f"{[target.name for target in targets]} lie apart"
        widths = {target.in_features for target in targets}
        assert len(widths) == 1, f"{[target.name for target in targets]} read {sorted(widths)} features"
        assert len(set(self._is_expert[rows])) == 1, f"{[target.name for target in targets]} are not all of experts"
        entries, shape = slice(self._begins[rows.start], self._begins[rows.stop]), (len(indices), -1)
        first, rank, scaling = (table[entries].view(shape) for table in (self._first, self._rank, self._scaling))
        out_features = tuple(target.out_features for target in targets)
        group = ModuleGroup(self._pool.pages, self.page_ids, first, rank, scaling, widths.pop(), out_features)
        vectors = {name: table[entries].view(shape) for name, table in self._vectors.items()}
        return group, Epilogue(self._pool.values, **vectors)

    def columns(self, weights: Mapping[str, ModulePages]) -> Columns:
        """An adapter's columns, of its weights by target module name. Any thread may call this."""
        num_targets = len(self._targets)
        rank = np.zeros(num_targets, dtype=np.int32)
        scaling = np.zeros(num_targets, dtype=np.float32)
        first = np.zeros(num_targets, dtype=np.int32)
        vectors = {name: np.full(num_targets, -1, dtype=np.int64) for name in self._vectors}
        for name, pages in weights.items():
            index = self._targets[name]
            rank[index], scaling[index], first[index] = pages.rank, pages.scaling, pages.first
            for table, start in pages.vectors.items():
                vectors[table][index] = start
        return Columns(rank, scaling, first, vectors)

    def upload(self, page_ids: npt.NDArray[np.int64], columns: Columns) -> TablesThere:
        """An adapter's pages and columns on the device, by one copy on the current stream. Any thread may call this."""
        arrays: tuple[npt.NDArray[Any], ...]
        arrays = (page_ids.astype(np.int32), columns.rank, columns.scaling, columns.first, *columns.vectors.values())
        pages, rank, scaling, first, *vectors = upload_all(self.page_ids.device, *arrays)
        return TablesThere(pages, rank, scaling, first, dict(zip(columns.vectors, vectors, strict=True)))

    def has_experts(self, slot: int) -> bool:
        """Whether the adapter in the slot has weights of experts."""
        return bool(self.host_rank[slot, self._is_expert].any())

    @property
    def size_bytes(self) -> int:
        """Bytes of the entries of all modules on the device."""
        tables = (self._first, self._rank, self._scaling, *self._vectors.values())
        return sum(table.numel() * table.element_size() for table in tables)

    def put(self, adapter: ResidentAdapter) -> None:
        """Enter an adapter into its slot, which must be empty."""
        assert adapter.slot not in self._rows, f"slot {adapter.slot} is taken"
        start = self._gap(len(adapter.page_ids))
        self._write(adapter, self._compact() if start is None else start)
        if adapter.rotation is not None:
            self.rotations[adapter.slot] = adapter.rotation
        self.version += 1

    def remove(self, slot: int) -> None:
        """Empty a slot's column and those that scale it. Does nothing for an empty slot."""
        if self._rows.pop(slot, None) is not None:
            for column in (slot, *self._scaled.get(slot, ())):
                self._empty(column)
            put_number(self.generation, slot, 0)
            self.rotations.pop(slot, None)
            self.rows.remove(slot)
            self.version += 1

    def put_scaled(self, scaled: ScaledColumn) -> None:
        """Give a column the adapter of a slot with a scale. It follows the slot until `remove_scaled`."""
        self._scaled.setdefault(scaled.slot, {})[scaled.column] = scaled
        self.slot_of_column[scaled.column] = scaled.slot
        self.sign_of_column[scaled.column] = -1.0 if scaled.scale < 0 else 1.0
        self._write_scaled(scaled)
        self.version += 1

    def remove_scaled(self, scaled: ScaledColumn) -> None:
        """Empty such a column."""
        columns = self._scaled[scaled.slot]
        del columns[scaled.column]
        if not columns:
            del self._scaled[scaled.slot]
        self._empty(scaled.column)
        self.version += 1

    def _empty(self, column: int) -> None:
        if column < self.num_slots:
            self._rank.index_fill_(0, self._on_device + column, 0)
            self.host_rank[column] = 0
            self.host_has_vectors[column] = False
        else:
            self._rank.index_fill_(0, self._scalable + column, 0)

    def _write_scaled(self, scaled: ScaledColumn) -> None:
        source, column = self._scalable + scaled.slot, self._scalable + scaled.column
        for table in (self._first, self._rank, *self._vectors.values()):
            table[column] = table[source]
        scaling = self._scaling[source] * scaled.scale
        self._scaling[column] = scaling.abs().sqrt() if scaled.is_linear else scaling

    def _gap(self, num_pages: int) -> int | None:
        """The first place of page_ids where so many ids are free, or None."""
        start = 0
        for begin, held in sorted(self._rows.values(), key=lambda row: row[0]):
            if begin - start >= num_pages:
                return start
            start = begin + len(held.page_ids)
        return start if len(self.page_ids) - start >= num_pages else None

    def _compact(self) -> int:
        """Move all rows to the front. Returns the first free index. Writes every adapter again, which takes long."""
        self.num_compactions += 1
        start = 0
        for _, adapter in sorted(self._rows.values(), key=lambda row: row[0]):
            self._write(adapter, start)
            start += len(adapter.page_ids)
        return start

    def _write(self, adapter: ResidentAdapter, start: int) -> None:
        columns, there, slot = adapter.columns, adapter.there, adapter.slot
        begin = (start + adapter.first_vector_page) * self._pool.values_per_page
        self.page_ids[start : start + len(adapter.page_ids)] = there.page_ids
        entries = self._on_device + slot
        # Nothing is uploaded here: behind the copies of loads under way, each upload would hold up the next step.
        self._first[entries] = torch.where(there.rank > 0, there.first + start, 0)
        self._rank[entries] = there.rank
        self._scaling[entries] = there.scaling
        for table, starts in there.vectors.items():
            self._vectors[table][entries] = torch.where(starts >= 0, starts + begin, -1)
        put_number(self.generation, slot, adapter.generation)
        self.host_rank[slot] = columns.rank
        self.host_has_vectors[slot] = np.logical_or.reduce([starts >= 0 for starts in columns.vectors.values()])
        self.rows.put(slot, adapter.rows, adapter.num_tokens, start, adapter.first_vector_page)
        self._rows[slot] = (start, adapter)
        for scaled in self._scaled.get(slot, {}).values():
            self._write_scaled(scaled)
