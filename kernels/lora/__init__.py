"""Adds each token's LoRA product to a linear's output.

`add_lora` does it whole: on the CPU from stacked weights along a `Route`, anywhere from pages (the definition).
`lora_route` groups a step's tokens on their device, for the operators on pages (kernels.lora.ops).
"""

from __future__ import annotations

import torch

from kernels.devices import has_triton
from kernels.lora import cpu, reference
from kernels.lora.layout import PAGE_RANKS, Columns, Epilogue, PagedSite, Route, SiteGroup, StackedSite, stack_columns
from kernels.lora.ops import (
    add_lora_group,
    bgmv_expand,
    bgmv_expand_slice,
    bgmv_shrink,
    lora_expand,
    lora_shrink,
    sgmv_expand,
    sgmv_expand_slice,
    sgmv_shrink,
)
from kernels.lora.route import DeviceRoute, default_block_tokens, route_in_torch

__all__ = [
    "PAGE_RANKS",
    "Columns",
    "DeviceRoute",
    "Epilogue",
    "PagedSite",
    "Route",
    "SiteGroup",
    "StackedSite",
    "add_lora",
    "add_lora_group",
    "bgmv_expand",
    "bgmv_expand_slice",
    "bgmv_shrink",
    "lora_expand",
    "lora_route",
    "lora_shrink",
    "sgmv_expand",
    "sgmv_expand_slice",
    "sgmv_shrink",
    "stack_columns",
]


def lora_route(token_slots: torch.Tensor, num_slots: int, *, block_tokens: int | None = None) -> DeviceRoute:
    """Group int32 [T] token slots by slot, once per step, without waiting for the device.

    Tokens of another slot than 0 .. num_slots - 1 have no adapter. A block holds tokens of one slot; the number of
    blocks is the most that T tokens can need, those left over have slot -1. With 8 slots and blocks of 2 tokens:

        token_slots    7 -1  2  7  7
        order          2  0  3  4 -1     token 2 for slot 2; tokens 0 3 4 for slot 7; token 1 has no adapter
        block_slot     2  7  7 -1 -1
        block_start    0  1  3  0  0     the block's tokens are order[block_start : block_end]
        block_end      1  3  4  0  0
    """
    if token_slots.dtype != torch.int32 or token_slots.dim() != 1:
        raise ValueError(f"token_slots is {token_slots.dtype} {list(token_slots.shape)}, want int32 [num_tokens]")
    if num_slots < 1:
        raise ValueError(f"num_slots is {num_slots}, want at least 1")
    if block_tokens is None:
        block_tokens = default_block_tokens(len(token_slots))
    if block_tokens < 1:
        raise ValueError(f"block_tokens is {block_tokens}, want at least 1")
    if token_slots.is_cuda and has_triton():
        from kernels.lora import triton_route

        return triton_route.route(token_slots.contiguous(), num_slots, block_tokens)
    return route_in_torch(token_slots, num_slots, block_tokens)


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
