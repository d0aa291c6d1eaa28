"""Adds each token's LoRA product to a linear's output, from weights in the arena's pages.

`adapter_segments` groups a step's tokens by adapter slot on their device, `segments_on_host` on the host for a CPU.
`add_lora_group` and the other operators of kernels.lora.ops walk over these segments.
"""

from __future__ import annotations

import torch

from kernels.devices import has_triton
from kernels.lora.layout import PAGE_RANKS, VECTOR_TABLES, Epilogue, ModuleGroup, PagedModule, page_values
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
    shrinks_apart,
)
from kernels.lora.segments import (
    MAX_BLOCK_TOKENS,
    AdapterSegments,
    default_block_tokens,
    segments_by_sorting,
    segments_in_torch,
    segments_on_host,
)

__all__ = [
    "PAGE_RANKS",
    "VECTOR_TABLES",
    "AdapterSegments",
    "Epilogue",
    "ModuleGroup",
    "PagedModule",
    "adapter_segments",
    "add_lora_group",
    "bgmv_expand",
    "bgmv_expand_slice",
    "bgmv_shrink",
    "grouped_segments",
    "lora_embed",
    "lora_expand",
    "lora_shrink",
    "page_values",
    "segments_on_host",
    "sgmv_expand",
    "sgmv_expand_slice",
    "sgmv_shrink",
    "shrinks_apart",
]


def adapter_segments(
    token_slots: torch.Tensor, num_slots: int, *, num_groups: int | None = None, block_tokens: int | None = None
) -> AdapterSegments:
    """Group int32 [T] token slots by slot, once per step, without waiting for the device.

    Tokens of another slot than 0 .. num_slots - 1 have no adapter. A block holds tokens of one slot; the number of
    blocks is the most that T tokens can need, those left over have slot -1. A host that knows how many slots the tokens
    name gives num_groups, and the kernels launch no programs for others. With 8 slots and blocks of 2 tokens:

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
        from kernels.lora import triton_segments

        return triton_segments.segments(token_slots.contiguous(), num_slots, block_tokens, num_groups)
    return segments_in_torch(token_slots, num_slots, block_tokens, num_groups)


def grouped_segments(token_slots: torch.Tensor, num_slots: int) -> AdapterSegments:
    """`adapter_segments` for many more slots than tokens, such as every pair of an adapter's slot and an expert."""
    return segments_by_sorting(token_slots, num_slots, default_block_tokens(len(token_slots)))
