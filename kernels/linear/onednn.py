"""oneDNN's product with a weight in its own blocked layout, which it reads without copying it first."""

from __future__ import annotations

import torch


def to_onednn(weight: torch.Tensor) -> torch.Tensor | None:
    """A weight [out, in] in oneDNN's layout, opaque to all but its products; None if there is none for the dtype."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return None
    try:
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    except RuntimeError:  # it names the instructions that it misses
        return None
    return packed


def onednn_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """torch.nn.functional.linear for a weight in oneDNN's layout; x [..., in] of any leading sizes."""
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return output
