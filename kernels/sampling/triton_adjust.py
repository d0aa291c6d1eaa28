"""Adjusted logits on the GPU: one dense launch for the penalties, one over the biased tokens alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.buckets import bucket, ceil_div
from kernels.sampling.rows import Adjustments
from kernels.triton_launch import kernel

BLOCK = 1024  # tokens of one program
BLOCK_BIASES = 128


@triton.jit
def _penalise(x, history, is_seen, repetition, presence, frequency):
    """See Adjustments; the history of a row without one is 0. Quotients are rounded as IEEE 754 says."""
    x = tl.where(is_seen, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
    times = history >> 1
    x = x - frequency * times.to(tl.float32)
    return x - presence * (times > 0).to(tl.float32)


@kernel
def penalise_kernel(
    # pointers
    adjusted_ptr,  # float32 [m, V], contiguous
    logits_ptr,  # [n, V]
    rows_ptr,  # int64 [m]
    repetition_ptr,  # float32 [m], and the two below
    presence_ptr,
    frequency_ptr,
    history_row_ptr,  # int64 [m]
    history_ptr,  # int32 [num_histories, V], contiguous
    # sizes
    vocab_size,
    # strides
    stride_ln,
    stride_lv,
    BLOCK: tl.constexpr,
):
    """adjusted[i] = penalised logits[rows[i]], biases left out. Grid: (m, blocks of V)."""
    index = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = offs < vocab_size
    row = tl.load(rows_ptr + index)
    x = tl.load(logits_ptr + row * stride_ln + offs.to(tl.int64) * stride_lv, mask=is_inside, other=0.0).to(tl.float32)
    history_row = tl.load(history_row_ptr + index)
    if history_row >= 0:
        history = tl.load(history_ptr + history_row * vocab_size + offs, mask=is_inside, other=0)
        repetition = tl.load(repetition_ptr + index)
        presence = tl.load(presence_ptr + index)
        frequency = tl.load(frequency_ptr + index)
        x = _penalise(x, history, history > 0, repetition, presence, frequency)
    tl.store(adjusted_ptr + index * vocab_size + offs, x, mask=is_inside)


@kernel(do_not_specialize=["num_biases"])
def bias_kernel(
    # pointers
    adjusted_ptr,  # float32 [m, V], contiguous
    logits_ptr,  # [n, V]
    rows_ptr,  # int64 [m]
    repetition_ptr,  # float32 [m], and the two below
    presence_ptr,
    frequency_ptr,
    history_row_ptr,  # int64 [m]
    history_ptr,  # int32 [num_histories, V], contiguous
    bias_row_ptr,  # int64 [num_biases]
    bias_token_ptr,  # int64 [num_biases]
    bias_ptr,  # float32 [num_biases]
    # sizes
    vocab_size,
    num_biases,
    # strides
    stride_ln,
    stride_lv,
    BLOCK: tl.constexpr,
):
    """Writes the biased tokens anew: biases come before penalties. Grid: (blocks of biases,)."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = offs < num_biases
    index = tl.load(bias_row_ptr + offs, mask=is_inside, other=0)
    token = tl.load(bias_token_ptr + offs, mask=is_inside, other=0)
    row = tl.load(rows_ptr + index, mask=is_inside, other=0)
    x = tl.load(logits_ptr + row * stride_ln + token * stride_lv, mask=is_inside, other=0.0).to(tl.float32)
    x += tl.load(bias_ptr + offs, mask=is_inside, other=0.0)
    history_row = tl.load(history_row_ptr + index, mask=is_inside, other=-1)
    has_history = is_inside & (history_row >= 0)
    history = tl.load(history_ptr + history_row * vocab_size + token, mask=has_history, other=0)
    repetition = tl.load(repetition_ptr + index, mask=is_inside, other=1.0)
    presence = tl.load(presence_ptr + index, mask=is_inside, other=0.0)
    frequency = tl.load(frequency_ptr + index, mask=is_inside, other=0.0)
    x = _penalise(x, history, history > 0, repetition, presence, frequency)
    tl.store(adjusted_ptr + index * vocab_size + token, x, mask=is_inside)


def adjust(logits: torch.Tensor, adjustments: Adjustments) -> torch.Tensor:
    """The adjusted logits of the m rows, float32 [m, vocab]; see the reference. Bit for bit the same."""
    num_rows, vocab_size, num_biases = len(adjustments.rows), logits.shape[1], len(adjustments.bias)
    adjusted = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=logits.device)
    shared = (
        adjusted,
        logits,
        adjustments.rows,
        adjustments.repetition,
        adjustments.presence,
        adjustments.frequency,
        adjustments.history_row,
        adjustments.history,
    )
    # No a * b + c in one rounding: the CPU rounds twice.
    penalise_kernel[(num_rows, ceil_div(vocab_size, BLOCK))](
        *shared, vocab_size, *logits.stride(), BLOCK=BLOCK, enable_fp_fusion=False
    )
    if num_biases > 0:
        bias_kernel[(bucket(ceil_div(num_biases, BLOCK_BIASES)),)](
            *shared,
            adjustments.bias_row,
            adjustments.bias_token,
            adjustments.bias,
            vocab_size,
            num_biases,
            *logits.stride(),
            BLOCK=BLOCK_BIASES,
            enable_fp_fusion=False,
        )
    return adjusted
