"""Weights of linears in layouts that a CPU multiplies faster than the checkpoint's, and products with plain ones.

A packed weight replaces the plain one, so that no memory is added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.linear import (
    from_panels,
    linear,
    plain_linear,
    row_linear,
    rows_linear,
    serves_row,
    serves_rows,
    to_panels,
)
from kernels.linear.choice import Form, fastest_form, fastest_unpacked_form
from kernels.linear.onednn import onednn_linear, to_onednn


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
    """A weight in panels, for the native product of kernels.linear."""

    panels: torch.Tensor
    out_features: int
    in_features: int

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        return linear(rows, self.panels, bias, self.out_features).view(*x.shape[:-1], self.out_features)

    def unpack(self) -> torch.Tensor:
        return from_panels(self.panels, self.out_features, self.in_features)


@dataclass(frozen=True, slots=True)
class SharedWeight:
    """The plain weight, for the native product: a head may share it with the embedding."""

    weight: torch.Tensor

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return plain_linear(rows, self.weight, bias).view(*x.shape[:-1], len(self.weight))

    def unpack(self) -> torch.Tensor:
        return self.weight


@dataclass(frozen=True, slots=True)
class OneDnnWeight:
    """A weight in oneDNN's blocked layout, which only oneDNN's products can read."""

    packed: torch.Tensor

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return onednn_linear(x, self.packed, bias)

    def unpack(self) -> torch.Tensor:
        return self.packed.to_dense()


def unpacked_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """torch.nn.functional.linear; of few rows on a GPU by kernels that read the weight faster. x [..., in]."""
    if serves_rows(x, weight):
        return rows_linear(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], len(weight))
    if serves_row(x, weight):
        return row_linear(x.reshape(1, -1), weight, bias).view(*x.shape[:-1], len(weight))
    return torch.nn.functional.linear(x, weight, bias)


def pack(weight: torch.Tensor) -> PackedWeight | None:
    """The weight [out, in] in the layout that was measured fastest here; None: the checkpoint's own layout."""
    weight = weight.detach()
    if weight.device.type != "cpu":
        return None
    out_features, in_features = weight.shape
    form = fastest_form(out_features, in_features, weight.dtype)
    if form is Form.NATIVE:
        return NativeWeight(to_panels(weight), out_features, in_features)
    if form is Form.SHARED:
        return SharedWeight(weight.clone(memory_format=torch.contiguous_format))  # replaces it, as every form does
    packed = to_onednn(weight) if form is Form.ONEDNN else None
    return None if packed is None else OneDnnWeight(packed)


def share(weight: torch.Tensor) -> PackedWeight | None:
    """The weight [out, in] as it is, for native code; None if torch is faster here."""
    weight = weight.detach()
    is_dense = weight.device.type == "cpu" and weight.is_contiguous()
    if is_dense and fastest_unpacked_form(weight.shape[0], weight.shape[1], weight.dtype) is Form.SHARED:
        return SharedWeight(weight)
    return None
