"""Normaliser and rank of one token per row on the GPU: one program and one read per row."""

from __future__ import annotations

import torch
import triton.language as tl

from kernels.triton_launch import kernel

BLOCK = 4096  # tokens per load


@kernel
def normalise_kernel(
    # pointers
    normaliser_ptr,  # float32 [n]
    rank_ptr,  # int64 [n]
    logits_ptr,  # [n, V]
    token_ids_ptr,  # int64 [n]
    # sizes
    vocab_size,
    # strides
    stride_ln,
    stride_lv,
    BLOCK: tl.constexpr,
):
    """See the reference. Grid: (n,). Each lane keeps its own maximum and float32 sum; lanes are joined at the end."""
    row = tl.program_id(0).to(tl.int64)
    chosen = tl.load(logits_ptr + row * stride_ln + tl.load(token_ids_ptr + row) * stride_lv).to(tl.float32)
    offs = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    num_larger = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, vocab_size, BLOCK):
        is_inside = begin + offs < vocab_size
        ptrs = logits_ptr + row * stride_ln + (begin + offs).to(tl.int64) * stride_lv
        x = tl.load(ptrs, mask=is_inside, other=float("-inf")).to(tl.float32)
        num_larger += (x > chosen).to(tl.int32)
        above = tl.maximum(highest, x)
        # A lane that has seen nothing but -inf has the sum 0, and -inf - -inf is NaN.
        is_empty = above == float("-inf")
        total = tl.where(is_empty, 0.0, total * tl.exp(highest - above) + tl.exp(x - above))
        highest = above
    top = tl.max(highest, 0)
    total = tl.sum(total * tl.exp(highest - top), 0)
    tl.store(normaliser_ptr + row, top + tl.log(total))
    tl.store(rank_ptr + row, tl.sum(num_larger, 0).to(tl.int64) + 1)


def normalise(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """log(sum of exp), float32 [n], and the tokens' ranks, int64 [n]; see the reference."""
    num_rows, vocab_size = logits.shape
    normaliser = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    rank = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows > 0:
        normalise_kernel[(num_rows,)](
            normaliser, rank, logits, token_ids, vocab_size, *logits.stride(), BLOCK=BLOCK, num_warps=8
        )
    return normaliser, rank
