"""gated_activation on the GPU: one read of both halves, one write.

Multiply and add are never fused, so that triton_folded.py gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.buckets import ceil_div, round_up

BLOCK = 1024


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """activation(gate) * up, float32."""
    if ACTIVATION == "silu":
        active = gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        active = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # 0.5 (1 + tanh(u)) = sigmoid(2 u), u = sqrt(2 / pi) (g + 0.044715 g^3)
        active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return active * up


@triton.jit
def gated_activation_kernel(
    y_ptr,  # [T, n], contiguous
    x_ptr,  # [T, 2 n]
    stride_xt,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """y = activation(gate) * up in float32. Grid: (T, chunks of n)."""
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = offs < WIDTH
    gate = tl.load(x_ptr + token * stride_xt + offs, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * stride_xt + WIDTH + offs, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * WIDTH + offs, gated(gate, up, ACTIVATION).to(y_ptr.dtype.element_ty), mask=is_inside)


def gated_activation(x: torch.Tensor, activation: str) -> torch.Tensor:
    """See the package."""
    num_tokens, width = x.shape[0], x.shape[1] // 2
    y = torch.empty(num_tokens, width, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    block = min(round_up(width), BLOCK)
    gated_activation_kernel[(num_tokens, ceil_div(width, block))](
        y, x, x.stride(0), WIDTH=width, BLOCK=block, ACTIVATION=activation, enable_fp_fusion=False
    )
    return y
