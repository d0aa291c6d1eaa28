"""Decode attention in C, cpu_decode.c, for sequences with one query: checks what it can serve, and calls it."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kernels import native_code
from kernels.paged_attention.batch import Decodes
from kernels.paged_attention.options import Options

SOURCE = Path(__file__).with_name("cpu_decode.c")
PAIR, TOKENS, CHUNK = 16, 4, 256  # as in the source
# Below so many bytes of keys and values one thread is done before others have begun.
PARALLEL_BYTES = 256 << 10


class Problem(ctypes.Structure):
    """The source's argument, which says what the fields are."""

    _fields_ = [  # ctypes wants a list
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "output")),
        *((name, ctypes.c_void_p) for name in ("tables", "sequences", "tokens", "context_lens")),
        *((name, ctypes.c_void_p) for name in ("sinks", "slopes", "scratch")),
        *((name, ctypes.c_int64) for name in ("scratch_size", "num_decodes", "head_parts")),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "key_dim", "value_dim")),
        *((name, ctypes.c_int64) for name in ("block_size", "table_width", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        ("is_bfloat16", ctypes.c_int32),
    ]


def prepare() -> None:
    """Compile the source, if that can be done here."""
    native_code.load(SOURCE)


def can_serve(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, options: Options) -> bool:
    """Whether the C takes such tensors: bfloat16 or float32 on the CPU, head sizes in sixteens, blocks in fours."""
    return (
        query.device.type == "cpu"
        and query.dtype in (torch.bfloat16, torch.float32)
        and key_cache.dtype == query.dtype
        and key_cache.shape[3] % PAIR == value_cache.shape[3] % PAIR == 0
        and key_cache.shape[1] % TOKENS == 0
        and key_cache.shape[1] <= CHUNK
        and key_cache.is_contiguous()
        and value_cache.is_contiguous()
        and options.sparsity is None
        and not (torch.is_grad_enabled() and query.requires_grad)
        and native_code.load(SOURCE) is not None
        and (torch.get_num_threads() == 1 or native_code.openmp_parallel() is not None)
    )


def attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    decodes: Decodes,
    options: Options,
    output: torch.Tensor,
) -> None:
    """Write the rows of output [T, Hq, Dv] that belong to sequences with one query; query [T, Hq, D], contiguous."""
    library = native_code.load(SOURCE)
    assert library is not None, "can_serve was not asked"
    num_heads, key_dim = query.shape[1:]
    _, block_size, num_kv_heads, value_dim = value_cache.shape
    num_keys = decodes.context_lens
    if options.sliding_window is not None:
        num_keys = np.minimum(num_keys, options.sliding_window)
    num_bytes = int(num_keys.sum()) * num_kv_heads * (key_dim + value_dim) * query.element_size()
    if num_bytes == 0:
        return
    parallel = native_code.openmp_parallel() if num_bytes >= PARALLEL_BYTES else None
    # All of torch's threads or none of them: a team of another size would be made anew, and torch's after it.
    num_threads = 1 if parallel is None else torch.get_num_threads()
    head_parts = _head_parts(num_keys, num_kv_heads, num_threads)
    # Two numbers for each head beside its query, scores and sums; whole lines of the cache for each thread.
    scratch_size = -(-num_heads // head_parts * (key_dim + CHUNK + value_dim + 2) // 16) * 16
    scratch = torch.empty(num_threads * scratch_size, dtype=torch.float32, device="cpu")
    per_head = [None if part is None else part.float().contiguous() for part in (options.sinks, options.alibi_slopes)]
    problem = Problem(
        query=query.data_ptr(),
        keys=key_cache.data_ptr(),
        values=value_cache.data_ptr(),
        output=output.data_ptr(),
        tables=decodes.tables.ctypes.data,
        sequences=decodes.sequences.ctypes.data,
        tokens=decodes.tokens.ctypes.data,
        context_lens=decodes.context_lens.ctypes.data,
        sinks=None if per_head[0] is None else per_head[0].data_ptr(),
        slopes=None if per_head[1] is None else per_head[1].data_ptr(),
        scratch=scratch.data_ptr(),
        scratch_size=scratch_size,
        num_decodes=len(decodes.sequences),
        head_parts=head_parts,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        block_size=block_size,
        table_width=decodes.tables.shape[1],
        window=options.sliding_window or 0,
        scale=options.scale,
        softcap=options.softcap or 0.0,
        is_bfloat16=query.dtype == torch.bfloat16,
    )
    library.attend(ctypes.byref(problem), num_threads, ctypes.c_void_p(parallel))


def _head_parts(num_keys: npt.NDArray[np.int32], num_kv_heads: int, num_threads: int) -> int:
    """In how many tasks a sequence is cut, a divisor of num_kv_heads: none is more than half of a thread's share."""
    if num_threads == 1:
        return 1
    wanted = -(-2 * num_threads * int(num_keys.max()) // int(num_keys.sum()))
    return next(parts for parts in range(min(wanted, num_kv_heads), num_kv_heads + 1) if num_kv_heads % parts == 0)
