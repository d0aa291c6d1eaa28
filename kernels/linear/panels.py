"""Weights of linears in panels, the layout that the native product reads (see linear.c)."""

from __future__ import annotations

import torch

from kernels.native import num_lanes


def to_panels(weight: torch.Tensor) -> torch.Tensor:
    """The panels of a weight [out, in]: [ceil(out / PAIR), in, PAIR], of bfloat16 [.., ceil(in / 2), PAIR, 2].

    PAIR is twice the number of lanes. Outputs and inputs past the weight's are zeros.
    """
    out_features, in_features = weight.shape
    width, lanes = 2 * num_lanes(), num_lanes()
    num_panels = -(-out_features // width)
    if weight.dtype != torch.bfloat16:
        padded = _padded(weight, num_panels * width, in_features)
        return padded.view(num_panels, width, in_features).transpose(1, 2).contiguous()
    num_pairs = -(-in_features // 2)
    padded = _padded(weight, num_panels * width, 2 * num_pairs)
    # Outputs 0 2 4 .. of a panel before 1 3 5 ..
    parted = padded.view(num_panels, lanes, 2, num_pairs, 2)
    return parted.permute(0, 3, 2, 1, 4).reshape(num_panels, num_pairs, width, 2)


def from_panels(panels: torch.Tensor, out_features: int, in_features: int) -> torch.Tensor:
    """The weight [out, in] of panels; a copy."""
    if panels.dtype != torch.bfloat16:
        return panels.transpose(1, 2).reshape(-1, in_features)[:out_features].contiguous()
    num_panels, num_pairs, width, _ = panels.shape
    parted = panels.view(num_panels, num_pairs, 2, width // 2, 2).permute(0, 3, 2, 1, 4)
    return parted.reshape(num_panels * width, 2 * num_pairs)[:out_features, :in_features].contiguous()


def _padded(weight: torch.Tensor, out_features: int, in_features: int) -> torch.Tensor:
    if weight.shape == (out_features, in_features):
        return weight.contiguous()
    padded = weight.new_zeros(out_features, in_features)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    return padded
