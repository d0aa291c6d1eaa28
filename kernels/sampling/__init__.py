"""Next tokens from logits, per row: greedy, or temperature, top-k, top-p with a seed. `sample` is the only public call.

The draw of a row depends on its logits, seed and position alone: not on the device, not on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.sampling import reference

__all__ = ["SamplingRows", "sample"]


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each of n rows draws. All tensors lie on the logits' device."""

    temperature: torch.Tensor  # float32 [n], no unit, >= 0; 0 is greedy
    top_k: torch.Tensor  # int64 [n] most likely tokens kept; 0 keeps all
    top_p: torch.Tensor  # float32 [n] nucleus, in (0, 1]
    seed: torch.Tensor  # int64 [n], the 64 bits of an unsigned seed
    position: torch.Tensor  # int64 [n] index of the token within its answer, from 0


def sample(logits: torch.Tensor, rows: SamplingRows | None) -> torch.Tensor:
    """One token id per row, int64 [n], for finite logits [n, vocab] of any float dtype. rows=None: all greedy."""
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits is {tuple(logits.shape)}, want [rows, vocabulary]")
    if rows is None:
        return logits.argmax(dim=-1)
    wanted = {
        "temperature": torch.float32,
        "top_k": torch.int64,
        "top_p": torch.float32,
        "seed": torch.int64,
        "position": torch.int64,
    }
    for name, dtype in wanted.items():
        tensor: torch.Tensor = getattr(rows, name)
        if tensor.dtype != dtype or tensor.shape != logits.shape[:1] or tensor.device != logits.device:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, "
                f"want {dtype} [{logits.shape[0]}] on {logits.device}"
            )
    return reference.sample(logits, rows.temperature, rows.top_k, rows.top_p, rows.seed, rows.position)
