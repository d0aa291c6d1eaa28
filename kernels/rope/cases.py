"""Shapes of apply_rope for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.rope.reference import HeadNorm


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
    num_skipped: int = 0  # tokens at KV position -1
    is_strided: bool = False  # query, key and value are slices of one fused projection
    has_norm: bool = False
    weight_offset: float = 0.0
    has_positions: bool = True  # else the tables have one row for each token


CASES = (
    Case("no token", 0),
    Case("one token", 1),
    Case("skipped tokens", 5, num_skipped=2),
    Case("part of a head", 4, rotary_dim=6, dim=10, value_dim=7),
    Case("MQA, strided", 6, num_heads=3, num_kv_heads=1, is_strided=True),
    Case("norm", 3, num_heads=5, is_strided=True, has_norm=True),
    Case("norm, part of a head", 2, dim=20, rotary_dim=12, value_dim=3, has_norm=True, weight_offset=1.0),
    Case("a row for each token", 5, has_norm=True, has_positions=False, num_skipped=1),
)


@dataclass(slots=True)
class Inputs:
    """Arguments of one case, in the order of apply_rope_and_store_kv's."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    positions: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    kv_positions: torch.Tensor
    norm: HeadNorm | None

    def store(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Value, caches and kv_positions."""
        return self.value, self.key_cache, self.value_cache, self.kv_positions

    def changed(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """What apply_rope_and_store_kv writes."""
        return self.query, self.key, self.key_cache, self.value_cache


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
    kv_positions = torch.randperm(32, generator=generator)[: case.num_tokens]
    kv_positions[: case.num_skipped] = -1
    caches = [
        torch.full((4, 8, case.num_kv_heads, dim), float("nan"), dtype=dtype, device=device)
        for dim in (case.dim, case.value_dim)
    ]
    positions = torch.randint(0, 100, (case.num_tokens,), generator=generator)
    if not case.has_positions:
        angles = angles[positions]
    # As transformers gives them: every value twice, so that rows are not dense.
    tables = [torch.cat([table, table], dim=1).to(device)[:, :half] for table in (angles.cos(), angles.sin())]
    weights = [torch.randn(case.dim, generator=generator).to(dtype).to(device) for _ in range(2)]
    return Inputs(
        parts[0],
        parts[1],
        parts[2],
        positions.to(device) if case.has_positions else None,
        tables[0],
        tables[1],
        caches[0],
        caches[1],
        kv_positions.to(device),
        HeadNorm(weights[0], weights[1], 1e-5, case.weight_offset) if case.has_norm else None,
    )
