"""apply_rope in fewer passes than the definition takes; for every device that torch runs on."""

from __future__ import annotations

import torch

from kernels.rope.reference import HeadNorm


def apply_rope(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: HeadNorm | None,
) -> None:
    """See the package. Query and key that lie side by side, as a fused projection leaves them, are turned as one."""
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    if norm is not None:
        for x, weight in ((query, norm.query_weight), (key, norm.key_weight)):
            values = x.float()
            scale = values.square().mean(dim=-1, keepdim=True).add_(norm.eps).rsqrt_()
            _turn(torch.mul(values, scale).mul_(weight.float() + norm.weight_offset), x, cos, sin)
        return
    for x in (query, key) if not _is_behind(key, query) else (_joined(query, key),):
        _turn(x.float(), x, cos, sin)


def _turn(values: torch.Tensor, out: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Write the rotated values, which may be `out` itself."""
    half = cos.shape[-1]
    a, b = values[..., :half], values[..., half : 2 * half]
    turned_a = (a * cos).addcmul_(b, sin, value=-1)
    turned_b = (b * cos).addcmul_(a, sin)
    out[..., :half] = turned_a
    out[..., half : 2 * half] = turned_b
    if values is not out:
        out[..., 2 * half :] = values[..., 2 * half :]


def _is_behind(key: torch.Tensor, query: torch.Tensor) -> bool:
    """Whether each token's key heads follow its query heads at the same distance."""
    is_shared = key.untyped_storage().data_ptr() == query.untyped_storage().data_ptr()
    begin = query.storage_offset() + query.shape[1] * query.stride(1)
    return is_shared and key.stride() == query.stride() and key.storage_offset() == begin


def _joined(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    num_tokens, num_heads, dim = query.shape
    return query.as_strided((num_tokens, num_heads + key.shape[1], dim), query.stride())
