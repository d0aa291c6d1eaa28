"""The adapters of tokens that have more than one, as columns of the slot table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from data_plane.plan import Int32Array


@dataclass(frozen=True, slots=True)
class FurtherColumns:
    """Columns of the slot table by token, int32 [T] each; -1: none.

    A token whose adapters' products are summed has its second to fourth adapter in `products`; its first is where that
    of every other token is. A token whose adapters' A and B are summed has all of them in `linear`.
    """

    products: tuple[Int32Array, ...] = ()
    linear: tuple[Int32Array, ...] = ()

    def take(self, indices: npt.NDArray[np.int64]) -> FurtherColumns:
        """The columns of the tokens at these indices."""
        return FurtherColumns(
            tuple(columns[indices] for columns in self.products), tuple(columns[indices] for columns in self.linear)
        )

    @property
    def every(self) -> tuple[Int32Array, ...]:
        return self.products + self.linear
