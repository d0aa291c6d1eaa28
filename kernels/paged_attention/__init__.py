"""Attention of a step's queries over the paged KV cache. `paged_attention` is the only public call.

Build one `AttentionBatch` per step and pass it to every layer.
"""

from __future__ import annotations

from typing import TypedDict

import torch

from kernels.devices import runs_triton
from kernels.paged_attention import cpu
from kernels.paged_attention.batch import AttentionBatch


class Options(TypedDict):
    """Keyword arguments that every implementation takes."""

    scale: float
    sliding_window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None


__all__ = ["AttentionBatch", "paged_attention"]


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, Hq, Dv] for query [T, Hq, D] over caches [num_blocks, block_size, Hkv, D] and [..., Dv].

    Causal: the queries of a sequence are its last tokens, whose keys are in the cache already. scale multiplies
    q . k. sliding_window counts the query's own token: 1 sees only itself. softcap bounds the scores by tanh. sinks
    [Hq] are one more logit per head that takes weight and gives nothing. alibi_slopes [Hq] times (position of the key -
    position of the query) are added to the scores, after the soft cap. Head sizes above 256 run without Triton.
    """
    num_heads, dim = query.shape[-2:]
    num_kv_heads = key_cache.shape[2]
    if query.dim() != 3 or query.shape[0] != batch.query_start[-1]:
        raise ValueError(f"query is {tuple(query.shape)}, the batch has {batch.query_start[-1]} tokens")
    if dim != key_cache.shape[3] or num_heads % num_kv_heads or key_cache.shape[:3] != value_cache.shape[:3]:
        raise ValueError(
            f"query {tuple(query.shape)} does not fit caches {tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        )
    if query.dtype != key_cache.dtype or query.dtype != value_cache.dtype:
        raise ValueError(f"query is {query.dtype}, the caches are {key_cache.dtype} and {value_cache.dtype}")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window}, want at least 1 or None")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}, want more than 0 or None")
    for name, per_head in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if per_head is not None and per_head.shape != (num_heads,):
            raise ValueError(f"{name} is {tuple(per_head.shape)}, want [{num_heads}]")
    options: Options = {
        "scale": scale,
        "sliding_window": sliding_window,
        "softcap": softcap,
        "sinks": sinks,
        "alibi_slopes": alibi_slopes,
    }
    if runs_triton(query):
        from kernels.paged_attention import triton_kernel

        if triton_kernel.can_serve(key_cache, value_cache):
            return triton_kernel.paged_attention(query, key_cache, value_cache, batch, **options)
    return cpu.paged_attention(query.contiguous(), key_cache, value_cache, batch, **options)
