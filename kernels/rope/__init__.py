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
from kernels.tensor_facts import Facts, facts, is_dense

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
    if _check(*_facts(query, key, positions, cos, sin, norm)) and runs_triton(query):
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
    rotated = _facts(query, key, positions, cos, sin, norm)
    stored = (facts(value), facts(key_cache), facts(value_cache), facts(kv_positions))
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
def _is_dense(value: Facts, kv_positions: Facts) -> bool:
    """Whether the GPU's kernel may serve these."""
    return value[1][2] == 1 and is_dense(kv_positions)


_Facts = tuple[Facts, Facts, Facts | None, Facts, Facts, tuple[Facts, Facts] | None]


def _facts(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: HeadNorm | None,
) -> _Facts:
    weights = None if norm is None else (facts(norm.query_weight), facts(norm.key_weight))
    return facts(query), facts(key), None if positions is None else facts(positions), facts(cos), facts(sin), weights


@lru_cache(maxsize=1024)
def _check(
    query: Facts,
    key: Facts,
    positions: Facts | None,
    cos: Facts,
    sin: Facts,
    weights: tuple[Facts, Facts] | None,
) -> bool:
    """Whether the GPU's kernel may serve these. Raises ValueError for what does not fit each other."""
    shapes = (query[0], key[0])
    if len(shapes[0]) != 3 or len(shapes[1]) != 3 or shapes[0][::2] != shapes[1][::2] or query[2] != key[2]:
        raise ValueError(
            f"query is {query[2]} {tuple(shapes[0])} and key {key[2]} {tuple(shapes[1])}, "
            "want [T, Hq, D] and [T, Hkv, D] of one dtype"
        )
    num_tokens, _, dim = shapes[0]
    if positions is not None and (positions[2] != torch.int64 or positions[0] != (num_tokens,)):
        raise ValueError(f"positions is {positions[2]} {tuple(positions[0])}, want int64 [{num_tokens}]")
    if len(cos[0]) != 2 or cos[0] != sin[0] or not 0 < 2 * cos[0][1] <= dim:
        raise ValueError(f"cos is {tuple(cos[0])} and sin {tuple(sin[0])}, want [positions, n] with 2 n at most {dim}")
    if positions is None and cos[0][0] != num_tokens:
        raise ValueError(f"cos has {cos[0][0]} rows for {num_tokens} tokens; give positions, or one row for each token")
    for name, weight in zip(("query_weight", "key_weight"), weights or (), strict=False):
        if weight[0] != (dim,):
            raise ValueError(f"norm.{name} is {tuple(weight[0])}, want [{dim}]")
    are_rows_dense = all(each[1][-1] == 1 for each in (query, key, cos, sin, *(weights or ())))
    return are_rows_dense and (positions is None or is_dense(positions))
