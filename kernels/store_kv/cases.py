"""Shapes of store_kv for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.fp8 import FP8, KVScale


@dataclass(frozen=True, slots=True)
class Case:
    """One input. Slots are a seeded choice without repetition."""

    name: str
    num_tokens: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    num_blocks: int
    block_size: int
    num_skipped: int  # tokens at KV position -1
    is_strided: bool = False  # key and value are slices of one wider tensor, as a fused projection leaves them


CASES = (
    Case("no token", 0, 2, 16, 16, 4, 16, 0),
    Case("one token", 1, 2, 16, 16, 4, 16, 0),
    Case("one skipped token", 1, 2, 16, 16, 4, 16, 1),
    Case("odd sizes", 13, 3, 7, 5, 9, 3, 4),
    Case("strided", 33, 4, 32, 32, 8, 16, 2, is_strided=True),
    Case("every kv_position", 64, 1, 8, 8, 4, 16, 0),
    Case("decode of 256 rows", 256, 8, 64, 64, 64, 16, 0),
)


def make(case: Case, dtype: torch.dtype, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Key, value and KV positions of the case."""
    generator = torch.Generator().manual_seed(seed)
    width = case.num_kv_heads * (case.key_dim + case.value_dim)
    fused = torch.randn(case.num_tokens, width + 3, generator=generator).to(dtype)
    split = case.num_kv_heads * case.key_dim
    key = fused[:, :split].view(case.num_tokens, case.num_kv_heads, case.key_dim)
    value = fused[:, split:width].view(case.num_tokens, case.num_kv_heads, case.value_dim)
    if not case.is_strided:
        key, value = key.contiguous(), value.contiguous()
    kv_positions = torch.randperm(case.num_blocks * case.block_size, generator=generator)[: case.num_tokens]
    kv_positions[torch.randperm(case.num_tokens, generator=generator)[: case.num_skipped]] = -1
    return key, value, kv_positions


def make_fp8_caches(
    case: Case, *, has_token_scales: bool, device: str | torch.device = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, KVScale, KVScale]:
    """FP8 caches of the case, all ones, and their scales: floats, or 7 for each token and head."""
    shape = (case.num_blocks, case.block_size, case.num_kv_heads)
    keys, values = (torch.ones(*shape, dim, device=device).to(FP8) for dim in (case.key_dim, case.value_dim))
    if has_token_scales:
        return keys, values, torch.full(shape, 7.0, device=device), torch.full(shape, 7.0, device=device)
    return keys, values, 0.003, 0.3
