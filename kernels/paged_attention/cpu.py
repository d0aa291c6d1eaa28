"""paged_attention on gathered keys: torch's fused attention where it can, plain products where it cannot.

Written for the CPU, runs on any device. One gather and one product per group of decode sequences or per prefill
sequence; no loop over heads: query heads of one key head are rows of one product. On a CPU with a C compiler,
`native` takes most of both.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.fp8 import FP8, KVScale, widen
from kernels.paged_attention import native
from kernels.paged_attention.batch import AttentionBatch, DecodeGroup, KeyBlocks, PrefillSequence
from kernels.paged_attention.options import Options

# Scores of one plain product, in bytes: bounds its memory for long prefills.
SCORE_BYTES = 32 << 20


def paged_attention(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, batch: AttentionBatch, options: Options
) -> torch.Tensor:
    """See the package."""
    num_tokens, num_heads, dim = query.shape
    num_kv_heads, value_dim = value_cache.shape[2:]
    output = query.new_empty(num_tokens, num_heads, value_dim)
    grouped = query.view(num_tokens, num_kv_heads, num_heads // num_kv_heads, dim)
    shape = (key_cache, options.sliding_window, query.dtype)
    attention = _Attention(options, num_heads, num_kv_heads, query.device)
    groups: list[DecodeGroup] = []
    prefills: list[PrefillSequence] = []
    has_native = native.can_serve(query, key_cache, value_cache, options)
    if has_native:
        native.attend(query, key_cache, value_cache, batch, options, output)
    else:
        groups = batch.decode_groups(*shape)
    if not (has_native and batch.is_causal):
        prefills = batch.prefills(*shape)
    for decodes in groups:
        keys = _gather(decodes.keys, key_cache, options.key_scale, query.dtype).transpose(1, 2)  # [n, Hkv, K, D]
        values = _gather(decodes.keys, value_cache, options.value_scale, query.dtype).transpose(1, 2)
        mixed = attention.decode(grouped[decodes.rows], keys, values, decodes)
        output[decodes.rows] = mixed.reshape(-1, num_heads, value_dim)
    for prefill in prefills:
        keys = _gather(prefill.keys, key_cache, options.key_scale, query.dtype)[0].transpose(0, 1)  # [Hkv, K, D]
        values = _gather(prefill.keys, value_cache, options.value_scale, query.dtype)[0].transpose(0, 1)
        rows = grouped[prefill.start : prefill.end].permute(1, 2, 0, 3)  # [Hkv, G, Q, D]
        mixed = attention.prefill(rows, keys, values, prefill)
        output[prefill.start : prefill.end] = mixed.permute(2, 0, 1, 3).reshape(-1, num_heads, value_dim)
    if not isinstance(options.value_scale, torch.Tensor) and options.value_scale != 1.0:
        output.mul_(options.value_scale)
    return output


def _gather(blocks: KeyBlocks, cache: torch.Tensor, scale: KVScale, dtype: torch.dtype) -> torch.Tensor:
    """[num_sequences, keys, Hkv, D] in dtype; FP8 values times their token's scale, but not times a cache's."""
    if cache.dtype != FP8:
        return blocks.take(cache)
    codes = blocks.take(cache.view(torch.uint8)).view(FP8)
    if not isinstance(scale, torch.Tensor):
        return widen(codes, dtype)
    return widen(codes, torch.float32).mul_(blocks.take(scale).unsqueeze(-1)).to(dtype)


class _Attention:
    """A layer's options, shaped for products of [Hkv, G] heads."""

    def __init__(self, options: Options, num_heads: int, num_kv_heads: int, device: torch.device) -> None:
        def by_group(per_head: torch.Tensor | None) -> torch.Tensor | None:
            return None if per_head is None else per_head.float().view(num_kv_heads, -1)

        key_scale = options.key_scale
        self.scale = options.scale * (1.0 if isinstance(key_scale, torch.Tensor) else key_scale)
        self.softcap = options.softcap
        self.sinks = by_group(options.sinks)
        self.slopes = by_group(options.alibi_slopes)
        self.sparsity = options.sparsity
        self.offsets: torch.Tensor | None = None
        if options.sparsity is not None:
            self.offsets = options.sparsity.offsets(num_heads, num_kv_heads).to(device).view(num_kv_heads, -1)
        # torch's fused attention knows none of these.
        self.is_plain = any(option is not None for option in (self.softcap, self.sinks, self.slopes, self.sparsity))

    def decode(
        self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, decodes: DecodeGroup
    ) -> torch.Tensor:
        """[n, Hkv, G, Dv] for rows [n, Hkv, G, D] over keys [n, Hkv, K, D]."""
        if not self.is_plain:
            return scaled_dot_product_attention(rows, keys, values, decodes.mask, scale=self.scale)
        places = decodes.own_keys[:, None]
        return self._plain(rows.unsqueeze(3), keys, values, decodes.mask, places).squeeze(3)

    def prefill(
        self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prefill: PrefillSequence
    ) -> torch.Tensor:
        """[Hkv, G, Q, Dv] for rows [Hkv, G, Q, D] over keys [Hkv, K, D]."""
        if self.is_plain:
            return self._plain_prefill(rows, keys, values, prefill)
        group = rows.shape[1]
        return scaled_dot_product_attention(
            rows,
            keys.unsqueeze(1).expand(-1, group, -1, -1),
            values.unsqueeze(1).expand(-1, group, -1, -1),
            prefill.mask,
            is_causal=prefill.is_causal,
            scale=self.scale,
        )

    def _plain_prefill(
        self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prefill: PrefillSequence
    ) -> torch.Tensor:
        """_plain over slices of queries, so that the scores stay below SCORE_BYTES."""
        num_kv_heads, group, num_queries, _ = rows.shape
        num_keys = keys.shape[1]
        mask = prefill.mask
        if prefill.is_causal:
            hidden = torch.ones(num_queries, num_keys, dtype=torch.bool, device=rows.device).triu_(1)
            mask = torch.zeros(num_queries, num_keys, device=rows.device).masked_fill_(hidden, float("-inf"))
        step = max(SCORE_BYTES // (num_kv_heads * group * num_keys * 4), 1)
        places = torch.arange(num_keys - num_queries, num_keys, device=rows.device)
        parts = [
            self._plain(
                rows[None, :, :, start : start + step],
                keys[None],
                values[None],
                None if mask is None else mask[start : start + step],
                places[None, start : start + step],
            )[0]
            for start in range(0, num_queries, step)
        ]
        return torch.cat(parts, dim=2)

    def _plain(
        self,
        rows: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        places: torch.Tensor,
    ) -> torch.Tensor:
        """Attention in fp32 with every option.

        rows [n, Hkv, G, Q, D], keys [n, Hkv, K, D], values [n, Hkv, K, Dv], mask [n, 1, 1, K] or [Q, K]; places
        [n, Q]: of each query's own key among the keys. Returns [n, Hkv, G, Q, Dv] in the rows' dtype.
        """
        num, num_kv_heads, group, num_queries, _ = rows.shape
        flat = rows.reshape(num, num_kv_heads, group * num_queries, -1).float()
        scores = torch.matmul(flat, keys.float().transpose(-1, -2)).mul_(self.scale)
        if self.softcap is not None:
            scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
        scores = scores.view(num, num_kv_heads, group, num_queries, -1)
        key_places = torch.arange(keys.shape[2], device=keys.device)
        own = places[:, None, None, :, None]
        if self.slopes is not None:
            scores += self.slopes[:, :, None, None] * (key_places - own)
        if self.sparsity is not None:
            # No window cuts where there is sparsity: places are positions.
            assert self.offsets is not None, "made together"
            shown = self.sparsity.sees(own, key_places, self.offsets[:, :, None, None])
            scores = scores.masked_fill_(~shown, float("-inf"))
        if mask is not None:
            scores += mask.unsqueeze(2) if mask.dim() == 4 else mask
        highest = scores.amax(dim=-1, keepdim=True)
        if self.sinks is not None:
            column = self.sinks.view(1, num_kv_heads, group, 1, 1)
            highest = torch.maximum(highest, column)
        weights = scores.sub_(highest).exp_()
        total = weights.sum(dim=-1, keepdim=True)
        if self.sinks is not None:
            total = total + (column - highest).exp()
        flat_weights = weights.view(num, num_kv_heads, group * num_queries, -1)
        mixed = torch.matmul(flat_weights, values.float()).view(num, num_kv_heads, group, num_queries, -1)
        return (mixed / total).to(rows.dtype)
