"""paged_attention on the GPU: one launch for sequences with one query, one for those with several.

Both run the same loop over tiles of keys with the query heads of one key head as rows of one product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from kernels.buckets import round_up
from kernels.devices import device_name
from kernels.paged_attention.batch import AttentionBatch, RowBatch
from kernels.paged_attention.launch import DecodeLaunch, PrefillLaunch, Sizes, decode_launch, prefill_launch
from kernels.paged_attention.options import Options, OptionSizes
from kernels.paged_attention.triton_decode import DecodeForm, run_decode
from kernels.paged_attention.triton_prefill import PrefillForm, run_prefill
from kernels.tensor_spec import TensorSpec, spec_of
from kernels.triton_launch import prepares

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
    form = _form(spec_of(query), spec_of(key_cache), spec_of(value_cache), options.sizes, decode, prefill)
    output = query.new_empty(*form.output_shape)
    on_device = batch.on_device(query.device, form.block_size)
    # An option that is off reads nothing through its pointer.
    of_options = (
        output if options.sinks is None else options.sinks.contiguous(),
        output if options.alibi_slopes is None else options.alibi_slopes.contiguous(),
        options.key_scale if isinstance(options.key_scale, torch.Tensor) else output,
        options.value_scale if isinstance(options.value_scale, torch.Tensor) else output,
    )
    rows = (query, key_cache, value_cache, on_device.block_tables)
    run_decode(output, rows, of_options, on_device, form.decode)
    run_prefill(output, rows, of_options, on_device, form.prefill)
    return output


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """How such queries attend to such caches."""

    output_shape: tuple[int, ...]
    block_size: int
    decode: DecodeForm
    prefill: PrefillForm


@prepares
def _form(
    query: TensorSpec,
    key_cache: TensorSpec,
    value_cache: TensorSpec,
    options: OptionSizes,
    decode: DecodeLaunch | None,
    prefill: PrefillLaunch | None,
) -> Form:
    (num_tokens, num_heads, dim), query_strides, dtype, device = query
    _, block_size, num_kv_heads, value_dim = value_cache.shape
    group = num_heads // num_kv_heads
    numbers = {
        **_options(options),
        # strides in elements; the output is dense
        "stride_ot": num_heads * value_dim,
        "stride_oh": value_dim,
        **dict(zip(("stride_qt", "stride_qh", "stride_qd"), query_strides, strict=True)),
        **dict(zip(("stride_kb", "stride_kp", "stride_kh"), key_cache.strides, strict=False)),
        **dict(zip(("stride_vb", "stride_vp", "stride_vh"), value_cache.strides, strict=False)),
        "GROUP": group,
        "KEY_DIM": dim,
        "VALUE_DIM": value_dim,
        "BLOCK_D": max(round_up(dim), 16),
        "BLOCK_DV": max(round_up(value_dim), 16),
        "BLOCK_SIZE": block_size,
    }
    name, sizes = device_name(device), Sizes.of_model(dtype, key_cache.dtype, max(dim, value_dim), group)
    return Form(
        (num_tokens, num_heads, value_dim),
        block_size,
        DecodeForm.of(numbers, num_heads, device, decode or decode_launch(name, sizes)),
        PrefillForm.of(numbers, num_heads, prefill or prefill_launch(name, sizes)),
    )


def _options(options: OptionSizes) -> dict[str, Any]:
    """The options by the kernels' names."""
    softcap, sparsity = options.softcap, options.sparsity
    key_scale, value_scale = options.key_scale, options.value_scale
    score_scale = options.scale * (1.0 if isinstance(key_scale, TensorSpec) else key_scale)
    # Those of the keys and of the values are contiguous and of one shape.
    stride_sb, stride_sp = key_scale.strides[:2] if isinstance(key_scale, TensorSpec) else (0, 0)
    return {
        "score_scale": score_scale * LOG2E if softcap is None else score_scale / softcap,
        "softcap": 0.0 if softcap is None else softcap * LOG2E,
        "window": options.sliding_window or 0,
        "value_scale": 1.0 if isinstance(value_scale, TensorSpec) else value_scale,
        "stride_sb": stride_sb,
        "stride_sp": stride_sp,
        "HAS_WINDOW": options.sliding_window is not None,
        "HAS_SOFTCAP": softcap is not None,
        "HAS_SINKS": options.sinks is not None,
        "HAS_SLOPES": options.alibi_slopes is not None,
        "HAS_TOKEN_SCALES": isinstance(key_scale, TensorSpec),
        "SPARSE_BLOCK": 0 if sparsity is None else sparsity.block_size,
        "LOCAL_BLOCKS": 1 if sparsity is None else sparsity.local_blocks,
        "VERTICAL_STRIDE": 1 if sparsity is None else sparsity.vertical_stride,
        "HEAD_STEP": 0 if sparsity is None else sparsity.head_sliding_step,
    }
