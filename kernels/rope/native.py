"""The native rotation with norms and cache writes: the structures that rope.c takes, and the op run alone."""

from __future__ import annotations

import ctypes

import torch

from kernels.fp8 import KVScale
from kernels.native import DTYPES, Step, has_native, integers, pointers, run_one
from kernels.rope.reference import HeadNorm
from kernels.store_kv import native as stores

_SERVED = (torch.float32, torch.bfloat16, torch.float16)

# What a rotation is followed by: value, key_cache, value_cache, kv_positions.
StoreTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Rotation(ctypes.Structure):
    """What a step turns heads by; rotation.h says what the fields are."""

    _fields_ = [*pointers("cos", "sin", "kv_positions"), *integers("cos_stride", "sin_stride", "dtype")]


class RotateStore(ctypes.Structure):
    """The source's argument; rope.c says what the fields are."""

    _fields_ = [  # ctypes wants a list
        ("store", stores.Store),
        *pointers("query", "query_norm", "key_norm"),
        *integers("query_stride", "query_head_stride", "num_heads", "half", "rotation_index"),
        ("eps", ctypes.c_float),
        ("weight_offset", ctypes.c_float),
    ]


class Rotations:
    """A step's rotations, one for every way in which layers rotate, and the tensors that they point to."""

    def __init__(self, kv_positions: torch.Tensor | None, *tables: tuple[torch.Tensor, torch.Tensor]) -> None:
        """kv_positions are int64 [T], -1 for a token that is not stored; tables are cos and sin [T, n], dense rows."""
        self._kept = (kv_positions, tables)
        self._array = (Rotation * len(tables))(*(_rotation(cos, sin, kv_positions) for cos, sin in tables))
        self.address = ctypes.addressof(self._array)  # for Step.rotation


def rotation(cos: torch.Tensor, sin: torch.Tensor, kv_positions: torch.Tensor | None) -> Rotations:
    """The Rotations of a model whose layers all rotate alike."""
    return Rotations(kv_positions, (cos, sin))


def can_serve(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: HeadNorm | None
) -> bool:
    """Whether native code rotates these. kernels.store_kv.native says whether it also stores them."""
    weights = [] if norm is None else [norm.query_weight, norm.key_weight]
    heads = [query, key, *weights]
    is_fit = key.dtype in _SERVED and all(tensor.dtype == key.dtype for tensor in heads)
    is_dense = all(tensor.stride(-1) == 1 for tensor in (*heads, cos, sin))
    return is_fit and is_dense and cos.dtype == sin.dtype and cos.dtype in _SERVED and has_native(*heads, cos, sin)


def problem(
    query: torch.Tensor,
    key: torch.Tensor,
    half: int,
    *,
    value: torch.Tensor | None = None,
    key_cache: torch.Tensor | None = None,
    value_cache: torch.Tensor | None = None,
    key_scale: KVScale = 1.0,
    value_scale: KVScale = 1.0,
    norm: HeadNorm | None = None,
    rotation_index: int = 0,
) -> RotateStore:
    """Query [T, Hq, D] and key [T, Hkv, D] are rotated in place by tables of `half` columns.

    With value [T, Hkv, Dv] and the caches, key and value are stored as store_kv does.
    """
    if value is None or key_cache is None or value_cache is None:
        tokens = stores.Part(tokens=key.data_ptr(), stride=key.stride(0), head_stride=key.stride(1), dim=key.shape[2])
        store = stores.Store(key=tokens, num_heads=key.shape[1], dtype=DTYPES[key.dtype])
    else:
        store = stores.store_of(key, value, key_cache, value_cache, key_scale, value_scale)
    return RotateStore(
        store=store,
        query=query.data_ptr(),
        query_norm=None if norm is None else norm.query_weight.data_ptr(),
        key_norm=None if norm is None else norm.key_weight.data_ptr(),
        query_stride=query.stride(0),
        query_head_stride=query.stride(1),
        num_heads=query.shape[1],
        half=half,
        rotation_index=rotation_index,
        eps=0.0 if norm is None else norm.eps,
        weight_offset=0.0 if norm is None else norm.weight_offset,
    )


def apply_rope(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: HeadNorm | None,
    store: StoreTensors | None,
) -> None:
    """See the package."""
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    half = cos.shape[1]
    kv_positions = None
    if store is None:
        of = problem(query, key, half, norm=norm)
    else:
        value, key_cache, value_cache, kv_positions = store
        kv_positions = kv_positions.contiguous()
        stores.check_kv_positions(kv_positions, key_cache)
        of = problem(query, key, half, value=value, key_cache=key_cache, value_cache=value_cache, norm=norm)
    rotations = rotation(cos, sin, kv_positions)
    run_one("rotate_store", of, Step(num_tokens=len(query), rotation=rotations.address))


def _rotation(cos: torch.Tensor, sin: torch.Tensor, kv_positions: torch.Tensor | None) -> Rotation:
    return Rotation(
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        kv_positions=None if kv_positions is None else kv_positions.data_ptr(),
        cos_stride=cos.stride(0),
        sin_stride=sin.stride(0),
        dtype=DTYPES[cos.dtype],
    )
