"""Attention of a step's queries over keys and values: `paged_attention`, `cross_attention`, `encoder_attention`.

Build one `AttentionBatch` per step and pass it to every layer, or a `RowBatch` where the device alone knows the rows.
The server uses `paged_attention`, without alibi_slopes and sparsity; it does not use `cross_attention`,
`encoder_attention` and `BlockSparsity` yet.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from kernels.devices import check_devices, runs_triton
from kernels.fp8 import FP8, KVScale, check_scales
from kernels.paged_attention import cpu
from kernels.paged_attention.batch import AttentionBatch, RowBatch
from kernels.paged_attention.options import BlockSparsity, Options, OptionSizes
from kernels.tensor_spec import TensorSpec, spec_of

__all__ = [
    "AttentionBatch",
    "BlockSparsity",
    "Options",
    "RowBatch",
    "attend",
    "cross_attention",
    "encoder_attention",
    "paged_attention",
]


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: AttentionBatch | RowBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sparsity: BlockSparsity | None = None,
    key_scale: KVScale = 1.0,
    value_scale: KVScale = 1.0,
) -> torch.Tensor:
    """[T, Hq, Dv] for query [T, Hq, D] over caches [num_blocks, block_size, Hkv, D] and [..., Dv].

    Causal: the queries of a sequence are its last tokens, whose keys are in the cache already. scale multiplies
    q . k. sliding_window counts the query's own token: 1 sees only itself. softcap bounds the scores by tanh. sinks
    [Hq] are one more logit per head that takes weight and adds no value. alibi_slopes [Hq] times (position of the key -
    position of the query) are added to the scores, after the soft cap. sparsity hides blocks of keys. FP8 caches are
    read with the scales that store_kv was given. Head sizes above 256 run without Triton. The block tables are not
    checked: an entry outside the caches reads other memory.
    """
    options = Options(scale, sliding_window, softcap, sinks, alibi_slopes, sparsity, key_scale, value_scale)
    return attend(query, key_cache, value_cache, batch, options)


def attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: AttentionBatch | RowBatch,
    options: Options,
) -> torch.Tensor:
    """paged_attention with options that are kept between steps."""
    if not batch.is_causal:
        raise ValueError("the batch is not causal; want one of AttentionBatch.build, or cross_attention")
    return _attend(query, key_cache, value_cache, batch, options)


def cross_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    softcap: float | None = None,
    key_scale: KVScale = 1.0,
    value_scale: KVScale = 1.0,
) -> torch.Tensor:
    """[T, Hq, Dv]: each of a sequence's queries sees all of its cached keys, such as an encoder's.

    The batch comes from AttentionBatch.build(..., is_causal=False): its block tables and context_lens are those of the
    encoder's keys, and a sequence may have any number of queries. Otherwise as paged_attention.
    """
    if batch.is_causal or batch.is_ragged:
        kind = "causal" if batch.is_causal else "ragged"
        raise ValueError(f"the batch is {kind}; cross attention wants AttentionBatch.build(..., is_causal=False)")
    options = Options(scale, softcap=softcap, key_scale=key_scale, value_scale=value_scale)
    return _attend(query, key_cache, value_cache, batch, options)


def encoder_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """[T, Hq, Dv] for query [T, Hq, D], key [T, Hkv, D] and value [T, Hkv, Dv] of whole sequences, without a cache.

    Bidirectional: each token sees all tokens of its sequence. The batch is AttentionBatch.ragged(lengths), the
    sequences lie one after the other.
    """
    if not batch.is_ragged:
        raise ValueError("the batch has a cache's block tables; encoder attention wants AttentionBatch.ragged")
    if key.dim() != 3 or value.dim() != 3 or key.shape[0] != batch.query_start[-1]:
        raise ValueError(
            f"key is {tuple(key.shape)} and value {tuple(value.shape)}, want [{batch.query_start[-1]}, Hkv, D]"
        )
    # Tokens are blocks of one.
    return _attend(query, key.unsqueeze(1), value.unsqueeze(1), batch, Options(scale, softcap=softcap))


def _attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: AttentionBatch | RowBatch,
    options: Options,
) -> torch.Tensor:
    """Check the arguments, then run the implementation for the device."""
    if query.dim() != 3 or query.shape[0] != batch.num_tokens:
        raise ValueError(f"query is {tuple(query.shape)}, the batch has {batch.num_tokens} tokens")
    _check(spec_of(query), spec_of(key_cache), spec_of(value_cache), options.sizes)
    if runs_triton(query):
        from kernels.paged_attention.triton_kernel import can_serve, paged_attention as launch

        if can_serve(key_cache, value_cache):
            return launch(query, key_cache, value_cache, batch, options)
    return cpu.paged_attention(query.contiguous(), key_cache, value_cache, batch.on_host(), options)


@lru_cache(maxsize=1024)
def _check(query: TensorSpec, key_cache: TensorSpec, value_cache: TensorSpec, options: OptionSizes) -> None:
    """Raise ValueError for what does not fit each other. Cached: most steps and layers have the same shapes."""
    (_, num_heads, dim), keys, values = query.shape, key_cache.shape, value_cache.shape
    if dim != keys[3] or num_heads % keys[2] or keys[:3] != values[:3]:
        raise ValueError(f"query {tuple(query.shape)} does not fit caches {tuple(keys)} and {tuple(values)}")
    if key_cache.dtype != value_cache.dtype or key_cache.dtype not in (query.dtype, FP8):
        raise ValueError(f"query is {query.dtype}, the caches are {key_cache.dtype} and {value_cache.dtype}")
    check_scales(key_cache, value_cache, options.key_scale, options.value_scale)
    options.check(num_heads)
    tensors = {"query": query, "key_cache": key_cache, "value_cache": value_cache}
    tensors |= {name: each for name in ("sinks", "alibi_slopes") if (each := getattr(options, name)) is not None}
    check_devices(**tensors)
