"""The base model's weights, as the kinds of adapters read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from kernels.fp8 import Fp8Rows


class BaseWeights(Protocol):
    """The base model's linears by module name. Thread-safe; callers do not write the tensors."""

    def weight(self, target_name: str) -> torch.Tensor | Fp8Rows:
        """[out, in] in the model's dtype or in FP8, where the model lies. A copy where its layout is another one."""
        ...

    def bias(self, target_name: str) -> torch.Tensor | None:
        """[out] in the model's dtype, or None if the linear has none."""
        ...
