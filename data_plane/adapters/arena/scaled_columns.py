"""Columns of the slot table for adapters that rows use with a scale: shared by the rows that scale alike.

No page is copied: such a column names the pages of its slot. Only the compute thread uses this.
"""

from __future__ import annotations

from data_plane.adapters.arena.slots import ScaledColumn, SlotTable
from data_plane.errors import PlanRefused

_Key = tuple[int, int, float, bool]  # slot, generation, scale, is_linear


class ScaledColumns:
    """Which rows use which column."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._free = list(range(table.num_columns - 1, table.num_slots - 1, -1))
        # Invariant: a column behind the slots is free or the value of one key, and a key has at least one row.
        self._columns: dict[_Key, ScaledColumn] = {}
        self._num_rows: dict[_Key, int] = {}

    def take(self, slot: int, generation: int, scale: float, *, is_linear: bool) -> int:
        """The column for one more row that uses the slot's adapter with this scale. Raises PlanRefused if none is free.

        The adapter must be in the slot table. A scale of 1 needs no column unless `is_linear`.
        """
        if scale == 1.0 and not is_linear:
            return slot
        key = (slot, generation, scale, is_linear)
        if key not in self._columns:
            if self._table.has_experts(slot):
                raise PlanRefused(f"slot {slot} has an adapter on experts, which takes no scale")
            if not self._free:
                raise PlanRefused("the rows scale more adapters than the slot table has columns for")
            column = self._columns[key] = ScaledColumn(self._free.pop(), slot, scale, is_linear)
            self._num_rows[key] = 0
            self._table.put_scaled(column)
        self._num_rows[key] += 1
        return self._columns[key].column

    def give_back(self, slot: int, generation: int, scale: float, *, is_linear: bool) -> None:
        """A row that called `take` with these values ended."""
        key = (slot, generation, scale, is_linear)
        if key not in self._num_rows:
            return  # a scale of 1
        self._num_rows[key] -= 1
        if self._num_rows[key] == 0:
            del self._num_rows[key]
            column = self._columns.pop(key)
            self._table.remove_scaled(column)
            self._free.append(column.column)

    @property
    def num_used(self) -> int:
        """Columns that rows use."""
        return len(self._columns)
