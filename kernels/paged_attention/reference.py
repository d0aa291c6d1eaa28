"""Attention over paged keys and values, the definition: one sequence after the other, everything in fp32."""

from __future__ import annotations

import torch

from kernels.fp8 import KVScale
from kernels.paged_attention.batch import AttentionBatch
from kernels.paged_attention.options import Options


def paged_attention(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, batch: AttentionBatch, options: Options
) -> torch.Tensor:
    """Attention of each sequence's queries over its cached keys, [T, Hq, Dv] in the query's dtype.

    Sequence i has the queries query_start[i] to query_start[i + 1], n of them, and context_lens[i] keys. In a causal
    batch the queries are its last tokens, at the positions context_lens[i] - n to context_lens[i] - 1. Query head h
    reads key head h // (Hq // Hkv). FP8 keys and values are multiplied by their scales first.

        s[q, k] = scale * q . k, then softcap * tanh(s / softcap), then + slope[h] * (position(k) - position(q))
        causal: k is visible if position(k) <= position(q), position(q) - position(k) < sliding_window, and the block
        sparsity shows its block; otherwise every k is visible
        p = exp(s) / (sum of exp(s) over visible k + exp(sinks[h]))
    """
    num_tokens, num_heads, _ = query.shape
    num_kv_heads, value_dim = value_cache.shape[2:]
    output = query.new_empty(num_tokens, num_heads, value_dim)
    for sequence, context_len in enumerate(batch.context_lens):
        start, end = batch.query_start[sequence], batch.query_start[sequence + 1]
        if start == end:
            continue
        blocks = batch.block_tables[sequence, : -(-context_len // key_cache.shape[1])].long()
        keys, values = (
            _take(cache, blocks, scale)[:context_len].repeat_interleave(num_heads // num_kv_heads, dim=1)
            for cache, scale in ((key_cache, options.key_scale), (value_cache, options.value_scale))
        )
        scores = torch.einsum("qhd,khd->hqk", query[start:end].float(), keys) * options.scale
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        if batch.is_causal:
            query_pos = torch.arange(context_len - (end - start), context_len, device=query.device)[:, None]
            key_pos = torch.arange(context_len, device=query.device)[None, :]
            if options.alibi_slopes is not None:
                scores = scores + options.alibi_slopes.float()[:, None, None] * (key_pos - query_pos)
            visible = (key_pos <= query_pos).expand_as(scores)
            if options.sliding_window is not None:
                visible = visible & (query_pos - key_pos < options.sliding_window)
            if options.sparsity is not None:
                offsets = options.sparsity.offsets(num_heads, num_kv_heads).to(query.device)
                visible = visible & options.sparsity.sees(query_pos, key_pos, offsets[:, None, None])
            scores = scores.masked_fill(~visible, float("-inf"))
        if options.sinks is not None:
            column = options.sinks.float()[:, None, None].expand(num_heads, end - start, 1)
            weights = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
        else:
            weights = scores.softmax(dim=-1)
        output[start:end] = torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
    return output


def _take(cache: torch.Tensor, blocks: torch.Tensor, scale: KVScale) -> torch.Tensor:
    """[tokens of the blocks, Hkv, D] in float32."""
    scales = scale[blocks].unsqueeze(-1) if isinstance(scale, torch.Tensor) else scale
    return (cache[blocks].float() * scales).flatten(0, 1)
