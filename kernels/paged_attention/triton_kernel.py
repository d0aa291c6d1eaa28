"""paged_attention on the GPU: one launch for sequences with one query, one for those with several.

Both run the same loop over tiles of keys with the query heads of one key head as rows of one product.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from kernels.buckets import round_up
from kernels.devices import device_name
from kernels.paged_attention.batch import AttentionBatch, RowBatch
from kernels.paged_attention.device_batch import DeviceBatch
from kernels.paged_attention.launch import DecodeLaunch, PrefillLaunch, Sizes, decode_launch, prefill_launch
from kernels.paged_attention.options import Options
from kernels.paged_attention.triton_decode import run_decode
from kernels.paged_attention.triton_prefill import run_prefill

LOG2E = math.log2(math.e)
MAX_HEAD_DIM = 256


def can_serve(key_cache: torch.Tensor, value_cache: torch.Tensor) -> bool:
    """Whether head sizes and layout are what the kernels are written for."""
    dims = (key_cache.shape[3], value_cache.shape[3])
    return max(dims) <= MAX_HEAD_DIM and key_cache.stride(3) == 1 and value_cache.stride(3) == 1


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: AttentionBatch | RowBatch,
    options: Options,
    *,
    decode: DecodeLaunch | None = None,
    prefill: PrefillLaunch | None = None,
) -> torch.Tensor:
    """See the package. The last two replace the launch parameters."""
    num_tokens, num_heads, dim = query.shape
    block_size, num_kv_heads, value_dim = value_cache.shape[1:]
    output = query.new_empty(num_tokens, num_heads, value_dim)
    on_device = batch.on_device(query.device, block_size)
    arguments = {
        **_tensors(output, query, key_cache, value_cache, on_device),
        **_options(options, output),
        "GROUP": num_heads // num_kv_heads,
        "KEY_DIM": dim,
        "VALUE_DIM": value_dim,
        "BLOCK_D": max(round_up(dim), 16),
        "BLOCK_DV": max(round_up(value_dim), 16),
        "BLOCK_SIZE": block_size,
    }
    name, sizes = device_name(query), Sizes.of(query, key_cache, value_cache)
    run_decode(output, on_device, arguments, decode or decode_launch(name, sizes))
    run_prefill(output, on_device, arguments, prefill or prefill_launch(name, sizes))
    return output


def _options(options: Options, output: torch.Tensor) -> dict[str, Any]:
    """The options by the kernels' names. An option that is off reads nothing through its pointer."""
    softcap, sparsity = options.softcap, options.sparsity
    has_token_scales = isinstance(options.key_scale, torch.Tensor)
    score_scale = options.scale * (1.0 if isinstance(options.key_scale, torch.Tensor) else options.key_scale)
    # Those of the keys and of the values are contiguous and of one shape.
    stride_sb, stride_sp = options.key_scale.stride()[:2] if isinstance(options.key_scale, torch.Tensor) else (0, 0)
    return {
        "score_scale": score_scale * LOG2E if softcap is None else score_scale / softcap,
        "softcap": 0.0 if softcap is None else softcap * LOG2E,
        "window": options.sliding_window or 0,
        "value_scale": 1.0 if isinstance(options.value_scale, torch.Tensor) else options.value_scale,
        "sinks_ptr": output if options.sinks is None else options.sinks.contiguous(),
        "slopes_ptr": output if options.alibi_slopes is None else options.alibi_slopes.contiguous(),
        "key_scale_ptr": options.key_scale if isinstance(options.key_scale, torch.Tensor) else output,
        "value_scale_ptr": options.value_scale if isinstance(options.value_scale, torch.Tensor) else output,
        "stride_sb": stride_sb,
        "stride_sp": stride_sp,
        "HAS_WINDOW": options.sliding_window is not None,
        "HAS_SOFTCAP": softcap is not None,
        "HAS_SINKS": options.sinks is not None,
        "HAS_SLOPES": options.alibi_slopes is not None,
        "HAS_TOKEN_SCALES": has_token_scales,
        "SPARSE_BLOCK": 0 if sparsity is None else sparsity.block_size,
        "LOCAL_BLOCKS": 1 if sparsity is None else sparsity.local_blocks,
        "VERTICAL_STRIDE": 1 if sparsity is None else sparsity.vertical_stride,
        "HEAD_STEP": 0 if sparsity is None else sparsity.head_sliding_step,
    }


def _tensors(
    output: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: DeviceBatch,
) -> dict[str, Any]:
    """Pointers and strides in elements, by the kernels' names."""
    return {
        "out_ptr": output,
        "query_ptr": query,
        "key_cache_ptr": key_cache,
        "value_cache_ptr": value_cache,
        "block_tables_ptr": batch.block_tables,
        "stride_ot": output.stride(0),
        "stride_oh": output.stride(1),
        "stride_qt": query.stride(0),
        "stride_qh": query.stride(1),
        "stride_qd": query.stride(2),
        "stride_kb": key_cache.stride(0),
        "stride_kp": key_cache.stride(1),
        "stride_kh": key_cache.stride(2),
        "stride_vb": value_cache.stride(0),
        "stride_vp": value_cache.stride(1),
        "stride_vh": value_cache.stride(2),
        "stride_table": batch.block_tables.stride(0),
    }
