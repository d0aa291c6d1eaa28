"""paged_attention, the definition: one sequence after the other, everything in fp32."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: Sequence[int],
    context_lens: Sequence[int],
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each sequence's queries over its cached keys, [T, Hq, Dv] in the query's dtype.

    Sequence i has the queries query_start[i] to query_start[i + 1]: its last tokens, at the positions
    context_lens[i] - n to context_lens[i] - 1. Query head h reads key head h // (Hq // Hkv).

        s[q, k] = scale * q . k, then softcap * tanh(s / softcap), then + slope[h] * (position(k) - position(q))
        k is visible if position(k) <= position(q) and position(q) - position(k) < sliding_window
        p = exp(s) / (sum of exp(s) over visible k + exp(sinks[h]))
    """
    num_tokens, num_heads, _ = query.shape
    block_size, num_kv_heads, value_dim = value_cache.shape[1:]
    group = num_heads // num_kv_heads
    output = query.new_empty(num_tokens, num_heads, value_dim)
    for sequence, context_len in enumerate(context_lens):
        start, end = query_start[sequence], query_start[sequence + 1]
        if start == end:
            continue
        blocks = block_tables[sequence, : -(-context_len // block_size)].long()
        keys = key_cache[blocks].flatten(0, 1)[:context_len].float().repeat_interleave(group, dim=1)
        values = value_cache[blocks].flatten(0, 1)[:context_len].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[start:end].float(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        query_pos = torch.arange(context_len - (end - start), context_len, device=query.device)[:, None]
        key_pos = torch.arange(context_len, device=query.device)[None, :]
        if alibi_slopes is not None:
            scores = scores + alibi_slopes.float()[:, None, None] * (key_pos - query_pos)
        visible = key_pos <= query_pos
        if sliding_window is not None:
            visible &= query_pos - key_pos < sliding_window
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            column = sinks.float()[:, None, None].expand(num_heads, end - start, 1)
            weights = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
        else:
            weights = scores.softmax(dim=-1)
        output[start:end] = torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
    return output
