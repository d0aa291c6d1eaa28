"""apply_rope, the definition."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norms that every head of query and key passes before it is rotated, as in Qwen3 and Gemma 3."""

    query_weight: torch.Tensor  # [D]
    key_weight: torch.Tensor  # [D]
    eps: float
    weight_offset: float = 0.0  # 1 for Gemma


def apply_rope(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: HeadNorm | None,
) -> None:
    """Rotate query [T, Hq, D] and key [T, Hkv, D] in place, in fp32, rounded once.

        x = x / sqrt(mean(x^2) + eps) * (weight + weight_offset)     over a head's D values, with a norm
        (a, b) = x[..., :n], x[..., n:2 n];  a' = a cos - b sin;  b' = b cos + a sin

    with cos and sin [num_positions, n] taken at the token's position, or row t for token t where positions is None
    (Su et al., RoFormer, 2021; halves as in GPT-NeoX and Llama).
    """
    half = cos.shape[1]
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    c, s = cos.float()[:, None], sin.float()[:, None]
    for x, weight_name in ((query, "query_weight"), (key, "key_weight")):
        values = x.float()
        if norm is not None:
            scale = torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + norm.eps)
            values = values * scale * (getattr(norm, weight_name).float() + norm.weight_offset)
        a, b = values[..., :half], values[..., half : 2 * half]
        x.copy_(torch.cat([a * c - b * s, b * c + a * s, values[..., 2 * half :]], dim=-1))
