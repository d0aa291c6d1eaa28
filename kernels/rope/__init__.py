"""Rotary position embedding, alone or with the head norms and the cache write of a layer.

`apply_rope` and `apply_rope_and_store_kv` are the public calls; the second is the first, then store_kv. Either norms
the heads first where a HeadNorm is given, and is one launch on a GPU, and one native op on a CPU.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from kernels.devices import runs_triton
from kernels.rope import cpu, native
from kernels.rope.reference import HeadNorm
from kernels.store_kv import check_store, native as stores, store_kv
from kernels.tensor_spec import TensorSpec, spec_of

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
    if _check(*_specs(query, key, positions, cos, sin, norm)) and runs_triton(query):
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
    rotated = _specs(query, key, positions, cos, sin, norm)
    stored = (spec_of(value), spec_of(key_cache), spec_of(value_cache), spec_of(kv_positions))
    are_rows_dense = _check(*rotated)
    check_store(rotated[1], *stored)
    store = (value, key_cache, value_cache, kv_positions)
    if are_rows_dense and _is_dense(stored[0], stored[3]) and runs_triton(query) and runs_triton(key_cache):
        from kernels.rope.triton_kernel import apply_rope as launch

        launch(query, key, positions, cos, sin, norm, store)
    elif native.can_serve(query, key, cos, sin, norm) and stores.can_serve(key, *store):
        native.apply_rope(query, key, positions, cos, sin, norm, store)
    else:
        apply_rope(query, key, positions, cos, sin, norm=norm)
        store_kv(key, value, key_cache, value_cache, kv_positions)


@lru_cache(maxsize=1024)
def _is_dense(value: TensorSpec, kv_positions: TensorSpec) -> bool:
    """Whether the GPU's kernel may serve these."""
    return value.strides[2] == 1 and kv_positions.is_contiguous()


# Of query, key, positions, cos, sin, and of the norm's two weights.
_Specs = tuple[TensorSpec, TensorSpec, TensorSpec | None, TensorSpec, TensorSpec, tuple[TensorSpec, TensorSpec] | None]


def _specs(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: HeadNorm | None,
) -> _Specs:
    weights = None if norm is None else (spec_of(norm.query_weight), spec_of(norm.key_weight))
    its_positions = None if positions is None else spec_of(positions)
    return spec_of(query), spec_of(key), its_positions, spec_of(cos), spec_of(sin), weights


@lru_cache(maxsize=1024)
def _check(
    query: TensorSpec,
    key: TensorSpec,
    positions: TensorSpec | None,
    cos: TensorSpec,
    sin: TensorSpec,
    weights: tuple[TensorSpec, TensorSpec] | None,
) -> bool:
    """Whether the GPU's kernel may serve these. Raises ValueError for what does not fit each other."""
    are_heads = len(query.shape) == len(key.shape) == 3
    if not are_heads or query.shape[::2] != key.shape[::2] or query.dtype != key.dtype:
        raise ValueError(
            f"query is {query.dtype} {tuple(query.shape)} and key {key.dtype} {tuple(key.shape)}, "
            "want [T, Hq, D] and [T, Hkv, D] of one dtype"
        )
    num_tokens, _, dim = query.shape
    if positions is not None and (positions.dtype != torch.int64 or positions.shape != (num_tokens,)):
        raise ValueError(f"positions is {positions.dtype} {tuple(positions.shape)}, want int64 [{num_tokens}]")
    if len(cos.shape) != 2 or cos.shape != sin.shape or not 0 < 2 * cos.shape[1] <= dim:
        raise ValueError(
            f"cos is {tuple(cos.shape)} and sin {tuple(sin.shape)}, want [positions, n] with 2 n at most {dim}"
        )
    if positions is None and cos.shape[0] != num_tokens:
        num_rows = cos.shape[0]
        raise ValueError(f"cos has {num_rows} rows for {num_tokens} tokens; give positions, or one row for each token")
    for name, weight in zip(("query_weight", "key_weight"), weights or (), strict=False):
        if weight.shape != (dim,):
            raise ValueError(f"norm.{name} is {tuple(weight.shape)}, want [{dim}]")
    are_rows_dense = all(each.strides[-1] == 1 for each in (query, key, cos, sin, *(weights or ())))
    return are_rows_dense and (positions is None or positions.is_contiguous())
