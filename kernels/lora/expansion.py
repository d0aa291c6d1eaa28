"""An expand that is left to the kernel that reads its rows next.

`lora_shrink` computes h; what is left is y += scaling * h @ B. The gate takes an Expansion, and its definition is:
`add` it, then the gate. On a GPU it does both in one launch, with the same bits (see triton_expand).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.lora.layout import Epilogue, GroupSizes, ModuleGroup
from kernels.lora.ops import lora_expand
from kernels.lora.segments import AdapterSegments, SegmentSizes
from kernels.tensor_spec import TensorSpec

_LEAST_COLUMNS = 16  # of a tensor core product
_MOST_COLUMNS = 128  # of 2-byte weights


class Expansion(NamedTuple):
    """What y still lacks."""

    y: torch.Tensor  # [T, sum of out], a linear's output
    h: torch.Tensor  # float32 [planes, modules, T, width]
    group: ModuleGroup
    segments: AdapterSegments
    epilogue: Epilogue | None = None

    def add(self) -> None:
        """Add it to y by a launch of its own."""
        lora_expand(self.h, self.group, self.y, self.segments, epilogue=self.epilogue)


def columns_of_tiles(y: TensorSpec, group: GroupSizes, segments: SegmentSizes, *runs: tuple[int, int]) -> int | None:
    """How many columns of y a kernel may expand at a time in runs (first column, length) that it cuts in tiles.

    A tile lies in one module, from a multiple of its size on. It has at most 128 columns of 2-byte weights, and
    half as many of float32: a step's tile of B lies in shared memory, of which sm_86 and sm_89 have 99 KiB. None
    where y is not dense, or no size will do.
    """
    _, strides, dtype, _ = y
    if not segments.has_token_slots or strides[1] != 1:
        return None
    page, most = group.page_columns, 2 * _MOST_COLUMNS // dtype.itemsize
    # Tiles of one page's columns are read fastest.
    columns = min(most, page & -page) if page & -page >= _LEAST_COLUMNS else 64
    for begin, length in runs:
        start = 0
        for features in group.out_features:
            if begin < start + features:
                break
            start += features
        if begin + length > start + features:
            return None
        within = begin - start
        columns = min(columns, within & -within) if within else columns
    return columns if columns >= _LEAST_COLUMNS else None
