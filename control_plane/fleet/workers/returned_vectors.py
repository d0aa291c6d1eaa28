"""Vectors in a worker's results: which rows return one, and the checks of what they returned. Pure.

The plan encoder uses it, and says when rows begin and are forgotten. What passes the checks goes to clients.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from contract.v1 import plan_pb2
from control_plane.fleet.workers.errors import GarbageResult
from control_plane.scheduler.types import Pooling, Vector

_FLOAT32 = np.dtype("<f4")


class ReturnedVectors:
    """Rows of one session that return vectors."""

    def __init__(self, hidden_width: int) -> None:
        self._hidden_width = hidden_width
        self._num_values: dict[int, int] = {}  # by row

    def begin(self, row: int, pooling: Pooling | None) -> None:
        """A row begins."""
        if pooling is not None:
            self._num_values[row] = pooling.num_labels or self._hidden_width

    def is_pooling(self, row: int) -> bool:
        """Whether the row returns a vector."""
        return row in self._num_values

    def forget(self, row: int) -> None:
        """A row is freed."""
        self._num_values.pop(row, None)

    def returned(self, message: plan_pb2.StepResult, rows: Sequence[int]) -> dict[int, Vector]:
        """The vectors of a result, for those of its `rows` that return one.

        Raises GarbageResult if one is missing, is of another row or size, or is not finite.
        """
        if not message.pooled and not self._num_values:
            return {}
        expected = [row for row in rows if row in self._num_values]
        if (returned := [entry.row for entry in message.pooled]) != expected:
            raise GarbageResult(f"step {message.step_id}: vectors of rows {returned}, expected are those of {expected}")
        return {entry.row: self._checked(message.step_id, entry) for entry in message.pooled}

    def _checked(self, step_id: int, entry: plan_pb2.PooledRow) -> Vector:
        num_values = self._num_values[entry.row]
        if len(entry.values) != num_values * _FLOAT32.itemsize:
            raise GarbageResult(
                f"step {step_id}: row {entry.row} returned a vector of {len(entry.values)} bytes; {num_values} float32 "
                "are expected"
            )
        values = np.frombuffer(entry.values, dtype=_FLOAT32)
        if not np.isfinite(values).all():
            raise GarbageResult(f"step {step_id}: row {entry.row} returned a vector that is not finite")
        return values
