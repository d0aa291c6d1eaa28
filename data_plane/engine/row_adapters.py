"""Which adapters each row uses, as columns of the slot table, and from which token on.

Most rows have the base model or one adapter. What only other rows need costs nothing while there are none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from data_plane.adapters.arena.scaled_columns import ScaledColumns
from data_plane.adapters.step.further_columns import FurtherColumns
from data_plane.errors import PlanRefused
from data_plane.plan import MAX_ROW_ADAPTERS, Int32Array, NewRow, RowAdapter

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Composed:
    """A row that combines adapters, or scales one."""

    members: tuple[RowAdapter, ...]
    is_linear: bool


class RowAdapters:
    """The adapters of all rows, by row number."""

    def __init__(self, max_rows: int, scaled: ScaledColumns) -> None:
        self._scaled = scaled
        # The column of a row's adapter, or of the first that it combines by products; -1: none.
        self.column = np.full(max_rows, -1, dtype=np.int32)
        self._further = np.full((MAX_ROW_ADAPTERS - 1, max_rows), -1, dtype=np.int32)
        self._linear = np.full((MAX_ROW_ADAPTERS, max_rows), -1, dtype=np.int32)
        self._active_from = np.zeros(max_rows, dtype=np.int64)  # tokens before the first that the adapters change
        self._composed: dict[int, _Composed] = {}
        self._late: set[int] = set()  # rows whose adapters change only tokens from some position on

    def add(self, new: NewRow) -> None:
        """Begin a row, whose adapters are in the slot table. Raises PlanRefused."""
        row = new.row
        if new.active_from and new.active_from >= new.num_prompt_tokens:
            raise PlanRefused(
                f"new row {row} has an adapter from token {new.active_from} on; it may begin within the prompt alone, "
                f"of {new.num_prompt_tokens} tokens"
            )
        self.column[row] = -1 if new.slot is None else new.slot
        if new.active_from:
            self._active_from[row] = new.active_from
            self._late.add(row)
        if new.adapters is None:
            return
        is_linear = new.adapters.is_linear
        columns = [
            self._scaled.take(member.slot, member.generation, member.scale, is_linear=is_linear)
            for member in new.adapters.members
        ]
        self._composed[row] = _Composed(new.adapters.members, is_linear)
        if is_linear:
            self.column[row] = -1
            self._linear[: len(columns), row] = columns
        else:
            self.column[row] = columns[0]
            self._further[: len(columns) - 1, row] = columns[1:]

    def free(self, rows: Int32Array) -> None:
        """End rows."""
        if not self._composed and not self._late:
            return
        for row in rows.tolist():
            if row in self._late:
                self._late.discard(row)
                self._active_from[row] = 0
            if row in self._composed:
                composed = self._composed.pop(row)
                self._further[:, row] = self._linear[:, row] = -1
                for member in composed.members:
                    self._scaled.give_back(member.slot, member.generation, member.scale, is_linear=composed.is_linear)

    def clear(self) -> None:
        """End every row."""
        self.free(np.array(sorted({*self._composed, *self._late}), dtype=np.int32))

    @property
    def num_scaled_columns(self) -> int:
        """Columns of the slot table that rows use beside those of slots."""
        return self._scaled.num_used

    def members_of(self, rows: Int64Array) -> list[RowAdapter]:
        """What these rows combine or scale; a row with a plain adapter has none."""
        if not self._composed:
            return []
        return [member for row in rows.tolist() if row in self._composed for member in self._composed[row].members]

    def of_tokens(self, rows: Int64Array, positions: Int64Array) -> tuple[Int32Array, FurtherColumns | None]:
        """The column of each token [T] of these rows at these positions, and those of tokens with several adapters."""
        first = self.column[rows]
        if not self._composed and not self._late:
            return first, None
        is_early = positions < self._active_from[rows]
        first[is_early] = -1
        if not self._composed:
            return first, None
        products, linear = (
            tuple(columns for columns in np.where(is_early, np.int32(-1), table[:, rows]) if (columns >= 0).any())
            for table in (self._further, self._linear)
        )
        return first, FurtherColumns(products, linear) if products or linear else None
