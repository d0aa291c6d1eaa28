"""Adds each token's LoRA product to a linear's output. `add_lora` is the only public call.

`Route` says which token takes which slot, once per step; weights come stacked (fast) or paged (the definition).
"""

from __future__ import annotations

import torch

from kernels.lora import cpu, reference
from kernels.lora.layout import PAGE_RANKS, Columns, PagedSite, Route, StackedSite, stack_columns

__all__ = ["PAGE_RANKS", "Columns", "PagedSite", "Route", "StackedSite", "add_lora", "stack_columns"]


def add_lora(y: torch.Tensor, x: torch.Tensor, weights: StackedSite | PagedSite, route: Route) -> None:
    """y [T, out] += scaling * (x [T, in] @ A.T) @ B in place, with the weights of each token's slot.

    Tokens without an adapter keep their bits. y may be a column slice of a wider tensor.
    """
    if isinstance(weights, PagedSite):
        in_features, out_features, dtype = weights.in_features, weights.out_features, weights.pages.dtype
    else:
        in_features, out_features, dtype = weights.a.shape[1], weights.b.shape[1], weights.a.dtype
    num_tokens = len(route.token_slots)
    if x.shape != (num_tokens, in_features) or y.shape != (num_tokens, out_features):
        raise ValueError(
            f"x is {tuple(x.shape)} and y {tuple(y.shape)}, want [{num_tokens}, {in_features}] "
            f"and [{num_tokens}, {out_features}]"
        )
    if x.dtype != dtype or y.dtype != dtype:
        raise ValueError(f"x is {x.dtype} and y {y.dtype}, the adapters are {dtype}")
    if isinstance(weights, PagedSite):
        reference.add_lora(y, x, weights, route.token_slots)
    else:
        cpu.add_lora(y, x, weights, route)
