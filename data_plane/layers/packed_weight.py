"""Weights of linears in another layout than the checkpoint's, which products on a CPU read faster.

A packed weight replaces the plain one: memory stays what it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.linear import from_panels, linear, to_panels
from kernels.native import has_native

_NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class PackedWeight(Protocol):
    """A weight [out, in] in some layout."""

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """torch.nn.functional.linear; x [..., in] of any leading sizes."""
        ...

    def unpack(self) -> torch.Tensor:
        """A plain copy [out, in]."""
        ...


@dataclass(frozen=True, slots=True)
class NativeWeight:
    """In panels, for the native product of kernels.linear."""

    panels: torch.Tensor
    out_features: int
    in_features: int

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        return linear(rows, self.panels, bias, self.out_features).view(*x.shape[:-1], self.out_features)

    def unpack(self) -> torch.Tensor:
        return from_panels(self.panels, self.out_features, self.in_features)


@dataclass(frozen=True, slots=True)
class OneDnnWeight:
    """In oneDNN's blocked layout, opaque to all but its own products."""

    packed: torch.Tensor

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")
        return output

    def unpack(self) -> torch.Tensor:
        return self.packed.to_dense()


def pack(weight: torch.Tensor) -> PackedWeight | None:
    """The weight [out, in] in the layout that is fastest here, or None where that is the checkpoint's own."""
    weight = weight.detach()
    if has_native(weight) and weight.dtype in _NATIVE_DTYPES:
        return NativeWeight(to_panels(weight), *weight.shape)
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and torch._C._has_mkldnn:
        return OneDnnWeight(torch.ops.mkldnn._reorder_linear_weight(weight, None))
    return None
