"""Rotary position embedding, alone or with the head norms and the cache write of a layer.

`apply_rope` and `apply_rope_and_store_kv` are the public calls; the second is the first, then store_kv. Either norms
the heads first where a HeadNorm is given, and is one launch on a GPU, and one native op on a CPU.
"""

from __future__ import annotations

import torch

from kernels.devices import runs_triton
from kernels.rope import cpu, native
from kernels.rope.reference import HeadNorm
from kernels.store_kv import check_store, native as stores, store_kv

__all__ = ["HeadNorm", "apply_rope", "apply_rope_and_store_kv"]


def apply_rope(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    norm: HeadNorm | None = None,
) -> None:
    """Rotate query [T, Hq, D] and key [T, Hkv, D] in place, their heads normed first if a norm is given.

    positions is int64 [T], each below num_positions; cos and sin are [num_positions, n], 2 n <= D. Without positions
    row t of the tables is token t's. The two values of a pair lie n apart; what is after 2 n is not rotated.
    """
    _check(query, key, positions, cos, sin, norm)
    if _runs_triton(query, key, positions, cos, sin, norm):
        from kernels.rope.triton_kernel import apply_rope as launch

        launch(query, key, positions, cos, sin, norm, None)
    elif native.can_serve(query, key, cos, sin, norm):
        native.apply_rope(query, key, positions, cos, sin, norm, None)
    else:
        cpu.apply_rope(query, key, positions, cos, sin, norm)


def apply_rope_and_store_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    kv_positions: torch.Tensor,
    *,
    norm: HeadNorm | None = None,
) -> None:
    """Do what apply_rope does, then write key and value to their KV positions as store_kv does without scales."""
    _check(query, key, positions, cos, sin, norm)
    check_store(key, value, key_cache, value_cache, kv_positions)
    store = (value, key_cache, value_cache, kv_positions)
    is_one_launch = _runs_triton(query, key, positions, cos, sin, norm) and runs_triton(key_cache)
    is_one_launch = is_one_launch and value.stride(2) == 1 and kv_positions.is_contiguous()
    if is_one_launch:
        from kernels.rope.triton_kernel import apply_rope as launch

        launch(query, key, positions, cos, sin, norm, store)
    elif native.can_serve(query, key, cos, sin, norm) and stores.can_serve(key, *store):
        native.apply_rope(query, key, positions, cos, sin, norm, store)
    else:
        apply_rope(query, key, positions, cos, sin, norm=norm)
        store_kv(key, value, key_cache, value_cache, kv_positions)


def _runs_triton(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: HeadNorm | None,
) -> bool:
    rows = [query, key, cos, sin] + ([] if norm is None else [norm.query_weight, norm.key_weight])
    is_dense = all(tensor.stride(-1) == 1 for tensor in rows)
    return runs_triton(query) and is_dense and (positions is None or positions.is_contiguous())


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: HeadNorm | None,
) -> None:
    if query.dim() != 3 or key.dim() != 3 or query.shape[::2] != key.shape[::2] or query.dtype != key.dtype:
        raise ValueError(
            f"query is {query.dtype} {tuple(query.shape)} and key {key.dtype} {tuple(key.shape)}, "
            "want [T, Hq, D] and [T, Hkv, D] of one dtype"
        )
    num_tokens, _, dim = query.shape
    if positions is not None and (positions.dtype != torch.int64 or positions.shape != (num_tokens,)):
        raise ValueError(f"positions is {positions.dtype} {tuple(positions.shape)}, want int64 [{num_tokens}]")
    if cos.dim() != 2 or cos.shape != sin.shape or not 0 < 2 * cos.shape[1] <= dim:
        raise ValueError(
            f"cos is {tuple(cos.shape)} and sin {tuple(sin.shape)}, want [positions, n] with 2 n at most {dim}"
        )
    if positions is None and len(cos) != num_tokens:
        raise ValueError(f"cos has {len(cos)} rows for {num_tokens} tokens; give positions, or one row for each token")
    if norm is not None:
        for name, weight in (("query_weight", norm.query_weight), ("key_weight", norm.key_weight)):
            if weight.shape != (dim,):
                raise ValueError(f"norm.{name} is {tuple(weight.shape)}, want [{dim}]")
