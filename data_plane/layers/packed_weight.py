"""Weights of linears in oneDNN's blocked layout, which products of a few dozen tokens take without copying them first.

The packed weight replaces the plain one: memory stays what it was.
"""

from __future__ import annotations

import torch


def can_pack(weight: torch.Tensor) -> bool:
    """Whether packing makes products with this weight faster, and torch was built with it.

    Measured with AVX-512, one thread, weights 1024 x 1024 to 2816 x 1024 out of cache, plain over packed time. float32:
    1 token 0.8 to 0.9, 4 tokens 1.5, 16 to 48 tokens 1.6 to 2.0, 100 tokens 1.3, 256 to 1024 tokens 1.0 to 1.2.
    bfloat16 without AMX: 0.97 to 1.0 for 32 and 512 tokens, so it is left alone.
    """
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and torch._C._has_mkldnn


def pack(weight: torch.Tensor) -> torch.Tensor:
    """The packed form of a weight [out, in], opaque to everything but packed_linear."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return packed


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """A plain copy [out, in] of what was packed."""
    return packed.to_dense()


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """torch.nn.functional.linear for a packed weight; x [..., in] of any leading sizes."""
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return output
