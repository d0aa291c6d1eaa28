"""The native ops of attention on the CPU: `attention_decode` (decode.c), `attention_prefill` (prefill.c).

Sequences with one query are decodes, those with several prefills. The two ops write different rows: one may be open.

A layer's problem is one structure, made once; what a step is goes into the AttentionStep, made once per step for all
layers. Both ops take both.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from kernels.fp8 import FP8
from kernels.native import DTYPES, Program, Step, has_native, integers, library, pointers
from kernels.paged_attention.batch import AttentionBatch
from kernels.paged_attention.native_step import AttentionStep
from kernels.paged_attention.options import Options

HEAD_UNIT = 16  # numbers


class Attention(ctypes.Structure):
    """The sources' argument; attention.h says what the fields are."""

    _fields_ = [  # ctypes wants a list
        *pointers("query", "keys", "values", "output", "sinks", "slopes", "key_scales", "value_scales", "parts"),
        *integers("query_stride", "output_stride"),
        *integers("num_heads", "num_kv_heads", "key_dim", "value_dim", "block_size"),
        *integers("window", "dtype", "cache_dtype"),
        *((name, ctypes.c_float) for name in ("scale", "softcap", "value_scale", "padding")),
    ]
    kept: list[Any]  # what the pointers point to beside the arguments of `problem`


def can_serve(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, options: Options) -> bool:
    """Whether there is native code for such tensors: head sizes in sixteens, no sparsity.

    The result holds for all steps of a model.
    """
    return (
        has_native(query, key_cache, value_cache)
        and query.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and key_cache.dtype in (query.dtype, FP8)
        and key_cache.shape[3] % HEAD_UNIT == value_cache.shape[3] % HEAD_UNIT == 0
        and key_cache.is_contiguous()
        and value_cache.is_contiguous()
        and options.sparsity is None
        and not (torch.is_grad_enabled() and query.requires_grad)
    )


def problem(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, options: Options, output: torch.Tensor
) -> Attention:
    """The argument of both ops for query [T, Hq, D] and output [T, Hq, Dv], whose rows may lie apart.

    Keeps what it makes of the options, but not the tensors.
    """
    num_heads, key_dim = query.shape[1:]
    _, block_size, num_kv_heads, value_dim = value_cache.shape
    assert query.stride()[1:] == (key_dim, 1) and output.stride()[1:] == (value_dim, 1), "heads of a row are dense"
    sinks, slopes = (
        None if part is None else part.float().contiguous() for part in (options.sinks, options.alibi_slopes)
    )
    key_scale, value_scale = options.key_scale, options.value_scale
    result = Attention(
        query=query.data_ptr(),
        keys=key_cache.data_ptr(),
        values=value_cache.data_ptr(),
        output=output.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        slopes=None if slopes is None else slopes.data_ptr(),
        key_scales=key_scale.data_ptr() if isinstance(key_scale, torch.Tensor) else None,
        value_scales=value_scale.data_ptr() if isinstance(value_scale, torch.Tensor) else None,
        query_stride=query.stride(0),
        output_stride=output.stride(0),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        block_size=block_size,
        window=options.sliding_window or 0,
        dtype=DTYPES[query.dtype],
        cache_dtype=DTYPES[key_cache.dtype],
        scale=options.scale * (1.0 if isinstance(key_scale, torch.Tensor) else key_scale),
        softcap=options.softcap or 0.0,
        value_scale=1.0 if isinstance(value_scale, torch.Tensor) else value_scale,
    )
    parts = _parts(_part_floats(result))
    result.parts = parts.data_ptr()
    result.kept = [sinks, slopes, parts]
    return result


def attention_step(batch: AttentionBatch, block_size: int) -> AttentionStep:
    """What Step.attention of a causal batch points to, for all layers with blocks of this size."""
    assert batch.is_causal, "the native ops are causal"
    batch.check_width(block_size)
    return batch.native_step


def attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: AttentionBatch,
    options: Options,
    output: torch.Tensor,
) -> None:
    """Write output [T, Hq, Dv]; of a batch that is not causal only the rows of sequences with one query."""
    batch.check_width(key_cache.shape[1])
    step = Step(num_tokens=query.shape[0], attention=ctypes.addressof(batch.native_step))
    layer = problem(query, key_cache, value_cache, options, output)
    program = Program()
    if batch.is_causal:
        program.add("attention_prefill", layer, is_open=True)
    program.add("attention_decode", layer)
    program.run(step)


@cache
def _parts(num_floats: int) -> torch.Tensor:
    """Where tasks leave sums for each other; for all layers and steps, since one run goes on at a time."""
    return torch.zeros(num_floats, dtype=torch.float32, device="cpu")


def _part_floats(problem: Attention) -> int:
    loaded = library()
    assert loaded is not None, "call has_native first"
    function = loaded.motet_attention_part_floats
    function.restype = ctypes.c_int64
    return int(function(ctypes.byref(problem)))
