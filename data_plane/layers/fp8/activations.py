"""The FP8 form of the activations that FP8 weights multiply.

A norm or a gate before a linear writes both forms in one pass: adapters read the plain one. Any other input is
quantised by a launch of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.fp8 import Fp8Rows
from kernels.fp8_rows import quantize_rows

# Called with who wrote kept rows, the tensor, and the rows.
OnRead = Callable[[object, torch.Tensor, Fp8Rows], None]


class Fp8Activations:
    """The FP8 form of the tensor that was written last. One for each model.

    It belongs to that tensor and to its views of other leading sizes, which nobody may change: a pass at load shows
    that nobody does.
    """

    def __init__(self) -> None:
        self.on_read: OnRead | None = None
        self._kept: tuple[object, torch.Tensor, Fp8Rows] | None = None

    def keep(self, writer: object, x: torch.Tensor, rows: Fp8Rows) -> None:
        """`rows` are those of x [..., n], which `writer` wrote."""
        self._kept = (writer, x, rows)

    def forget(self) -> None:
        """Free the kept rows: nobody reads them any more."""
        self._kept = None

    def of(self, x: torch.Tensor) -> Fp8Rows:
        """The FP8 rows of x [..., n]."""
        if self._kept is not None and _are_same_rows(x, self._kept[1]):
            if self.on_read is not None:
                self.on_read(*self._kept)
            return self._kept[2]
        return quantize_rows(x.reshape(-1, x.shape[-1]))


def _are_same_rows(x: torch.Tensor, kept: torch.Tensor) -> bool:
    """Whether both are the same rows in the same memory, as a norm's rows [T, n] and a view [1, T, n] of them are.

    `kept` is alive, so that no other tensor can have its memory.
    """
    if x is kept:
        return True
    is_view = x.data_ptr() == kept.data_ptr() and x.shape[-1] == kept.shape[-1] and x.numel() == kept.numel()
    return is_view and x.is_contiguous() and kept.is_contiguous()
