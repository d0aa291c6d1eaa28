"""The norms of a decoder, computed together with the residual sum before them."""

from __future__ import annotations

import torch
from torch import nn

from data_plane.layers.fp8.activations import Fp8Activations
from data_plane.quick_module import QuickModule
from kernels.rms_norm import rms_norm, rms_norm_fp8


class RmsNorm(QuickModule):
    """RMS norm over the last size.

    `prepare` computes the sum of a residual stream and the norm of the sum in one pass. The norm of exactly that tensor
    is then the kept one. Rows [T, n] are the layers' own form: each view of them costs the host a microsecond.
    """

    def __init__(self, weight: nn.Parameter, eps: float, weight_offset: float) -> None:
        super().__init__()
        self.weight = weight  # [n]
        self.eps = eps
        self.weight_offset = weight_offset  # 1 for Gemma
        self.fp8: Fp8Activations | None = None  # keeps the FP8 form of the norm, for the linears after it
        # A stream and its norm, or nothing. In place: a module's attributes are slow to set.
        self._ready: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The norm, of the shape of hidden_states [..., n]."""
        return self.of_stream(hidden_states).view(hidden_states.shape)

    def of_stream(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The norm of hidden_states [..., n] as rows [T, n]."""
        if self._ready:
            stream, normed = self._ready.pop()
            if stream is hidden_states:
                return normed
        return self._norm(hidden_states.reshape(-1, hidden_states.shape[-1]))

    def of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The norm of rows [T, n], which may be a column slice."""
        return rms_norm(rows, self.weight, self.eps, weight_offset=self.weight_offset)

    def add_to(self, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """rows [T, n] += x [..., n], in place; the norm of the sum [T, n]."""
        return self._norm(x if x.dim() == 2 else x.reshape(-1, rows.shape[1]), residual=rows)

    def prepare(self, stream: torch.Tensor, rows: torch.Tensor, x: torch.Tensor) -> None:
        """Compute add_to, and keep its result for the norm of `stream`, whose rows are `rows`."""
        self.keep(stream, self.add_to(rows, x))

    def keep(self, stream: torch.Tensor, normed: torch.Tensor) -> None:
        """Let the norm of `stream` be `normed`, rows [T, n]."""
        self._ready[:] = [(stream, normed)]

    def _norm(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The norm of rows x [T, n], for `residual` see kernels.rms_norm."""
        offset = self.weight_offset
        if self.fp8 is None:
            return rms_norm(x, self.weight, self.eps, residual=residual, weight_offset=offset)
        normed, codes = rms_norm_fp8(x, self.weight, self.eps, residual=residual, weight_offset=offset)
        self.fp8.keep(self, normed, codes)
        return normed
