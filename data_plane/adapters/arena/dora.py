"""DoRA scale of each output, computed once, when an adapter is loaded (Liu et al., arXiv 2402.09353, section 4).

Runs on loader threads; on a GPU on a stream of its own, so that no step waits behind it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

# float32 copies of the base weight's rows that are held at a time, twice over.
SLICE_BYTES = 32 << 20


class DoraScaleStream:
    """Where DoRA scales are computed."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch's stubs

    def dora_scale(
        self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, magnitude: torch.Tensor
    ) -> torch.Tensor:
        """magnitude / norm of the rows of weight + scaling * B.T @ A, float32 [out] on the host.

        weight [out, in]; A [rank, in], B [rank, out] and magnitude [out] on the host. The norms are float32 sums of
        the dtype's values. Raises ValueError for a norm that is 0 or not finite.
        """
        side: AbstractContextManager[object] = nullcontext()
        if self._stream is not None:
            side = torch.cuda.stream(self._stream)
        with side, torch.inference_mode():
            norm = _row_norms(weight, a.to(weight.device).float(), b.to(weight.device).float(), scaling).cpu()
        dora_scale = magnitude / norm
        wrong = ~torch.isfinite(dora_scale) | ~torch.isfinite(norm) | (norm == 0)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise ValueError(
                f"output {row} has magnitude {float(magnitude[row]):g} over a norm of {float(norm[row]):g}; "
                "both must be finite and the norm above 0"
            )
        return dora_scale


def _row_norms(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    num_rows = max(SLICE_BYTES // (4 * weight.shape[1]), 1)
    norms = []
    for begin in range(0, len(weight), num_rows):
        rows = slice(begin, begin + num_rows)
        merged = torch.addmm(weight[rows].float(), b[:, rows].T, a, alpha=scaling)
        norms.append(torch.linalg.vector_norm(merged, dim=1))
    return torch.cat(norms)
