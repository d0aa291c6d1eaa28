"""Shapes of apply_rope for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Case:
    """One call; the cache has 4 blocks of 8."""

    name: str
    num_tokens: int
    num_heads: int = 4
    num_kv_heads: int = 2
    dim: int = 16
    value_dim: int = 16
    rotary_dim: int = 16
    num_skipped: int = 0  # tokens of slot -1
    is_strided: bool = False  # query, key and value are slices of one fused projection


CASES = (
    Case("no token", 0),
    Case("one token", 1),
    Case("skipped tokens", 5, num_skipped=2),
    Case("part of a head", 4, rotary_dim=6, dim=10, value_dim=7),
    Case("MQA, strided", 6, num_heads=3, num_kv_heads=1, is_strided=True),
)


@dataclass(slots=True)
class Inputs:
    """Tensors of one case, in the order of apply_rope_and_store_kv's arguments."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slot_mapping: torch.Tensor


def make(case: Case, dtype: torch.dtype, *, device: str = "cpu", seed: int = 0) -> Inputs:
    """Caches begin as NaN."""
    generator = torch.Generator().manual_seed(seed)
    widths = [case.num_heads * case.dim, case.num_kv_heads * case.dim, case.num_kv_heads * case.value_dim]
    fused = torch.randn(case.num_tokens, sum(widths), generator=generator).to(dtype).to(device)
    shapes = ((case.num_heads, case.dim), (case.num_kv_heads, case.dim), (case.num_kv_heads, case.value_dim))
    parts = [
        part.view(case.num_tokens, *shape)
        for part, shape in zip(torch.split(fused, widths, dim=1), shapes, strict=True)
    ]
    if not case.is_strided:
        parts = [part.contiguous() for part in parts]
    half = case.rotary_dim // 2
    angles = torch.arange(100)[:, None] * 100.0 ** -(torch.arange(half) / half)
    slots = torch.randperm(32, generator=generator)[: case.num_tokens]
    slots[: case.num_skipped] = -1
    caches = [
        torch.full((4, 8, case.num_kv_heads, dim), float("nan"), dtype=dtype, device=device)
        for dim in (case.dim, case.value_dim)
    ]
    positions = torch.randint(0, 100, (case.num_tokens,), generator=generator)
    tables = (angles.cos().to(device), angles.sin().to(device))
    return Inputs(parts[0], parts[1], parts[2], positions.to(device), *tables, caches[0], caches[1], slots.to(device))
