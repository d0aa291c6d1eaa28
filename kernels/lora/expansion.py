"""An expand that is left to the kernel that reads its rows next.

`lora_shrink` computes h; what is left is y += scaling * h @ B. The gate takes an Expansion, and its definition is:
`add` it, then the gate. On a GPU it does both in one launch, with the same bits (see triton_expand).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.lora.layout import Epilogue, ModuleGroup
from kernels.lora.ops import lora_expand
from kernels.lora.segments import AdapterSegments

_LEAST_COLUMNS = 16  # of a tensor core product
_MOST_COLUMNS = 128  # of 2-byte weights


@dataclass(frozen=True, slots=True)
class Expansion:
    """What y still lacks."""

    y: torch.Tensor  # [T, sum of out], a linear's output
    h: torch.Tensor  # float32 [planes, modules, T, width]
    group: ModuleGroup
    segments: AdapterSegments
    epilogue: Epilogue | None = None

    def add(self) -> None:
        """Add it to y by a launch of its own."""
        lora_expand(self.h, self.group, self.y, self.segments, epilogue=self.epilogue)

    def columns_of_tiles(self, *runs: tuple[int, int]) -> int | None:
        """How many columns of y a kernel may expand at a time in runs (first column, length) that it cuts in tiles.

        A tile lies in one module, from a multiple of its size on. It has at most 128 columns of 2-byte weights, and
        half as many of float32: a step's tile of B lies in shared memory, of which sm_86 and sm_89 have 99 KiB. None
        where y is not dense, or no size will do.
        """
        if self.segments.token_slots is None or self.y.stride(1) != 1:
            return None
        page, most = self.group.pages.shape[2], 2 * _MOST_COLUMNS // self.y.element_size()
        # Tiles of one page's columns are read fastest.
        columns = min(most, page & -page) if page & -page >= _LEAST_COLUMNS else 64
        for begin, length in runs:
            start = 0
            for features in self.group.out_features:
                if begin < start + features:
                    break
                start += features
            if begin + length > start + features:
                return None
            within = begin - start
            columns = min(columns, within & -within) if within else columns
        return columns if columns >= _LEAST_COLUMNS else None
