"""Adds each token's LoRA product to a linear's output.

From stacked weights along a `Route`, as on the CPU: `add_lora`, `add_lora_sites` for linears that were fused,
`add_lora_embedding` for an embedding. From pages, as on a GPU: `lora_route` groups a step's tokens on their device, and
`add_lora_group` and the operators of kernels.lora.ops walk over them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.devices import check_devices, has_triton
from kernels.lora import cpu
from kernels.lora.layout import (
    PAGE_RANKS,
    Columns,
    Epilogue,
    PagedSite,
    Route,
    SiteGroup,
    SlotVectors,
    StackedSite,
    page_values,
    stack_columns,
)
from kernels.lora.ops import (
    add_lora_group,
    bgmv_expand,
    bgmv_expand_slice,
    bgmv_shrink,
    lora_embed,
    lora_expand,
    lora_shrink,
    sgmv_expand,
    sgmv_expand_slice,
    sgmv_shrink,
)
from kernels.lora.route import MAX_BLOCK_TOKENS, DeviceRoute, default_block_tokens, route_in_torch, route_on_host

__all__ = [
    "PAGE_RANKS",
    "Columns",
    "DeviceRoute",
    "Epilogue",
    "PagedSite",
    "Route",
    "SiteGroup",
    "SlotVectors",
    "StackedSite",
    "add_lora",
    "add_lora_embedding",
    "add_lora_group",
    "add_lora_sites",
    "bgmv_expand",
    "bgmv_expand_slice",
    "bgmv_shrink",
    "lora_embed",
    "lora_expand",
    "lora_route",
    "lora_shrink",
    "page_values",
    "route_on_host",
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
    if not 1 <= block_tokens <= MAX_BLOCK_TOKENS:
        raise ValueError(f"block_tokens is {block_tokens}, want 1 to {MAX_BLOCK_TOKENS}")
    if token_slots.is_cuda and has_triton():
        from kernels.lora import triton_route

        return triton_route.route(token_slots.contiguous(), num_slots, block_tokens)
    return route_in_torch(token_slots, num_slots, block_tokens)


def add_lora(y: torch.Tensor, x: torch.Tensor, weights: StackedSite, route: Route) -> None:
    """y [T, out] += scaling * (x [T, in] @ A.T) @ B in place, with the weights of each token's slot.

    Then the bias and the gain of the slot, where it has them (see Epilogue). Tokens without an adapter keep their bits.
    y may be a column slice of a wider tensor.
    """
    _check(y, x, weights, route)
    cpu.add_lora(y, x, [(slice(0, y.shape[1]), weights)], route)


def add_lora_sites(
    y: torch.Tensor, x: torch.Tensor, parts: Sequence[tuple[int, StackedSite | None]], route: Route
) -> None:
    """add_lora for sites that read the same x and write side by side in y [T, sum of out].

    parts: the width of each site, and its weights or None where no adapter of the route targets it.
    """
    widths = [width for width, _ in parts]
    if sum(widths) != y.shape[1]:
        raise ValueError(f"y has {y.shape[1]} columns, the sites have {widths}")
    targeted, end = [], 0
    for width, site in parts:
        begin, end = end, end + width
        if site is not None:
            _check(y[:, begin:end], x, site, route)
            targeted.append((slice(begin, end), site))
    cpu.add_lora(y, x, targeted, route)


def add_lora_embedding(
    y: torch.Tensor, token_ids: torch.Tensor, weights: StackedSite, route: Route, *, multiplier: float = 1.0
) -> None:
    """y [T, out] += multiplier * scaling * A[:, token_ids].T @ B in place: add_lora for an embedding.

    A is [rank, vocabulary]; the multiplier is the model's own for what it looks up.

    token_ids is int32 or int64 [T]; all are checked, so that a GPU is waited for. Tokens without an adapter keep their
    bits.
    """
    num_tokens = len(route.token_slots)
    if token_ids.shape != (num_tokens,) or token_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"token_ids is {token_ids.dtype} {list(token_ids.shape)}, want int32 or int64 [{num_tokens}]")
    _check_output(y, weights, route)
    check_devices(y=y, token_ids=token_ids)
    vocab_size = weights.a.shape[1]
    if num_tokens and (int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab_size):
        raise ValueError(
            f"token_ids are {int(token_ids.min())} to {int(token_ids.max())}, the vocabulary is 0 to {vocab_size - 1}"
        )
    cpu.add_lora_embedding(y, token_ids, weights, route, multiplier)


def _check(y: torch.Tensor, x: torch.Tensor, weights: StackedSite, route: Route) -> None:
    _check_output(y, weights, route)
    check_devices(y=y, x=x)
    num_tokens, in_features = len(route.token_slots), weights.a.shape[1]
    if x.shape != (num_tokens, in_features) or x.dtype != y.dtype:
        raise ValueError(f"x is {x.dtype} {list(x.shape)}, want {y.dtype} [{num_tokens}, {in_features}]")


def _check_output(y: torch.Tensor, weights: StackedSite, route: Route) -> None:
    check_devices(y=y, b=weights.b, token_slots=route.token_slots)
    num_tokens, out_features, dtype = len(route.token_slots), weights.b.shape[1], weights.b.dtype
    if y.shape != (num_tokens, out_features) or y.dtype != dtype:
        raise ValueError(
            f"y is {y.dtype} {list(y.shape)}, want {dtype} [{num_tokens}, {out_features}] as the adapters are"
        )
