"""paged_attention on gathered keys: torch's fused attention where it can, plain products where it cannot.

Written for the CPU, runs on any device. One gather and one product per group of decode sequences or per prefill
sequence; no loop over heads: query heads of one key head are rows of one product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.paged_attention.batch import AttentionBatch

# Scores of one plain product, in bytes: bounds its memory for long prefills.
SCORE_BYTES = 32 << 20


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the package."""
    num_tokens, num_heads, dim = query.shape
    num_kv_heads, value_dim = value_cache.shape[2:]
    output = query.new_empty(num_tokens, num_heads, value_dim)
    grouped = query.view(num_tokens, num_kv_heads, num_heads // num_kv_heads, dim)
    layout = batch.layout(key_cache, sliding_window, query.dtype)
    is_plain = softcap is not None or sinks is not None or alibi_slopes is not None
    head_sinks, slopes = (
        None if per_head is None else per_head.float().view(num_kv_heads, -1) for per_head in (sinks, alibi_slopes)
    )
    scores = _Scores(scale, softcap, head_sinks, slopes)
    for decodes in layout.decodes:
        keys = decodes.keys.take(key_cache).transpose(1, 2)  # [n, Hkv, K, D]
        values = decodes.keys.take(value_cache).transpose(1, 2)
        rows = grouped[decodes.rows]  # [n, Hkv, G, D]
        if is_plain:
            distance = torch.arange(keys.shape[2], device=keys.device) - decodes.own_keys[:, None]
            mixed = _plain(rows.unsqueeze(3), keys, values, decodes.mask, distance[:, None], scores).squeeze(3)
        else:
            mixed = scaled_dot_product_attention(rows, keys, values, decodes.mask, scale=scale)
        output[decodes.rows] = mixed.reshape(-1, num_heads, value_dim)
    for prefill in layout.prefills:
        keys = prefill.keys.take(key_cache)[0].transpose(0, 1)  # [Hkv, K, D]
        values = prefill.keys.take(value_cache)[0].transpose(0, 1)
        rows = grouped[prefill.start : prefill.end].permute(1, 2, 0, 3)  # [Hkv, G, Q, D]
        if is_plain:
            mixed = _plain_prefill(rows, keys, values, prefill.mask, scores)
        else:
            group = rows.shape[1]
            mixed = scaled_dot_product_attention(
                rows,
                keys.unsqueeze(1).expand(-1, group, -1, -1),
                values.unsqueeze(1).expand(-1, group, -1, -1),
                prefill.mask,
                is_causal=prefill.is_causal,
                scale=scale,
            )
        output[prefill.start : prefill.end] = mixed.permute(2, 0, 1, 3).reshape(-1, num_heads, value_dim)
    return output


@dataclass(frozen=True, slots=True)
class _Scores:
    """How products become weights."""

    scale: float
    softcap: float | None
    sinks: torch.Tensor | None  # [Hkv, G]
    slopes: torch.Tensor | None  # [Hkv, G]


def _plain_prefill(
    rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scores: _Scores
) -> torch.Tensor:
    """_plain over slices of queries, so that the scores stay below SCORE_BYTES. rows [Hkv, G, Q, D]."""
    num_kv_heads, group, num_queries, _ = rows.shape
    num_keys = keys.shape[1]
    if mask is None:
        hidden = torch.ones(num_queries, num_keys, dtype=torch.bool, device=rows.device).triu_(1)
        mask = torch.zeros(num_queries, num_keys, device=rows.device).masked_fill_(hidden, float("-inf"))
    step = max(SCORE_BYTES // (num_kv_heads * group * num_keys * 4), 1)
    key_indices = torch.arange(num_keys, device=rows.device)
    distance = key_indices - key_indices[num_keys - num_queries :, None]
    parts = [
        _plain(
            rows[None, :, :, start : start + step],
            keys[None],
            values[None],
            mask[start : start + step],
            distance[None, start : start + step],
            scores,
        )[0]
        for start in range(0, num_queries, step)
    ]
    return torch.cat(parts, dim=2)


def _plain(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    distance: torch.Tensor,
    options: _Scores,
) -> torch.Tensor:
    """Attention in fp32 with soft cap, ALiBi slopes and sinks.

    rows [n, Hkv, G, Q, D], keys [n, Hkv, K, D], values [n, Hkv, K, Dv], mask broadcastable to
    [n, Hkv, G * Q, K] with Q == 1 or to [Q, K]; distance [n, Q, K]: place of the key - place of the query.
    Returns [n, Hkv, G, Q, Dv] in the rows' dtype.
    """
    num, num_kv_heads, group, num_queries, _ = rows.shape
    flat = rows.reshape(num, num_kv_heads, group * num_queries, -1).float()
    scores = torch.matmul(flat, keys.float().transpose(-1, -2)).mul_(options.scale)
    if options.softcap is not None:
        scores = scores.div_(options.softcap).tanh_().mul_(options.softcap)
    scores = scores.view(num, num_kv_heads, group, num_queries, -1)
    if options.slopes is not None:
        scores += options.slopes[:, :, None, None] * distance[:, None, None]
    if mask is not None:
        scores += mask.unsqueeze(2) if mask.dim() == 4 else mask
    highest = scores.amax(dim=-1, keepdim=True)
    if options.sinks is not None:
        column = options.sinks.view(1, num_kv_heads, group, 1, 1)
        highest = torch.maximum(highest, column)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    if options.sinks is not None:
        total = total + (column - highest).exp()
    flat_weights = weights.view(num, num_kv_heads, group * num_queries, -1)
    mixed = torch.matmul(flat_weights, values.float()).view(num, num_kv_heads, group, num_queries, -1)
    return (mixed / total).to(rows.dtype)
