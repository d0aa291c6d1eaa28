"""Numbers of items that lie group by group."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def places_within(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The place of each item within its group, for groups of `counts` items: 2 and 3 give 0 1 0 1 2."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
