"""The weights of all experts of a layer for one product, and the product of rows that are sorted by expert."""

from __future__ import annotations

from typing import Protocol

import torch

from data_plane.layers.packed_weight import PackedWeight, pack


class ExpertWeights(Protocol):
    """The weights of one product, one [out, in] for each expert."""

    def product(self, x: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """y [S, out] for x [S, in]: expert e multiplies the rows ends[e - 1] to ends[e], int32 [experts].

        bias [S, out] is that of each row's expert.
        """
        ...

    def of(self, expert: int) -> torch.Tensor:
        """[out, in] of one expert; a copy where it is packed."""
        ...


class StackedWeights:
    """The checkpoint's own layout: one grouped product, as in transformers."""

    def __init__(self, stacked: torch.Tensor, *, is_transposed: bool) -> None:
        """stacked is [experts, out, in], or [experts, in, out] if it is_transposed."""
        self._stacked = stacked
        self._is_transposed = is_transposed

    def product(self, x: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See ExpertWeights."""
        weights = self._stacked if self._is_transposed else self._stacked.transpose(-2, -1)
        y = torch.nn.functional.grouped_mm(x, weights, offs=ends)
        return y if bias is None else y.add_(bias)

    def of(self, expert: int) -> torch.Tensor:
        """See ExpertWeights."""
        weight = self._stacked[expert].detach()
        return weight.T if self._is_transposed else weight


class PackedWeights:
    """Each expert in the layout that is fastest on this CPU, multiplied one after the other.

    A row has the same bits whatever other rows its expert has. In float32 torch's grouped product on a CPU has other
    sums for one to three rows than for more.
    """

    def __init__(self, packed: list[PackedWeight], out_features: int) -> None:
        self._packed = packed
        self._out_features = out_features

    @classmethod
    def made_of(cls, weights: StackedWeights, num_experts: int) -> PackedWeights | None:
        """None if the checkpoint's own layout is the fastest here."""
        packed = [pack(weights.of(expert)) for expert in range(num_experts)]
        known = [weight for weight in packed if weight is not None]
        return cls(known, len(weights.of(0))) if len(known) == num_experts else None

    def product(self, x: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See ExpertWeights."""
        y, begin = x.new_empty(len(x), self._out_features), 0
        for weight, end in zip(self._packed, ends.tolist(), strict=True):
            if end > begin:
                y[begin:end] = weight.linear(x[begin:end], None)
                begin = end
        return y if bias is None else y.add_(bias)

    def of(self, expert: int) -> torch.Tensor:
        """See ExpertWeights."""
        return self._packed[expert].unpack()
