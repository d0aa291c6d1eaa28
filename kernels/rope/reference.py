"""apply_rope, the definition."""

from __future__ import annotations

import torch


def apply_rope(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> None:
    """Rotate the first 2 n values of every head by position, in place, in fp32, rounded once.

        (a, b) = x[..., :n], x[..., n:2 n];  a' = a cos - b sin;  b' = b cos + a sin

    with cos and sin [num_positions, n] taken at the token's position (Su et al., RoFormer, 2021; halves as in GPT-NeoX
    and Llama).
    """
    half = cos.shape[1]
    c, s = cos[positions].float()[:, None], sin[positions].float()[:, None]
    for x in (query, key):
        a, b = x[..., :half].float(), x[..., half : 2 * half].float()
        x[..., : 2 * half] = torch.cat([a * c - b * s, b * c + a * s], dim=-1).to(x.dtype)
