"""store_kv as one scatter per cache, for every device that torch runs on."""

from __future__ import annotations

import torch

from kernels.fp8 import FP8, FP8_MAX, MIN_SCALE, KVScale


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    kv_positions: torch.Tensor,
    key_scale: KVScale = 1.0,
    value_scale: KVScale = 1.0,
) -> None:
    """See the package. On CUDA it waits for the device once: how many tokens are skipped is data."""
    kept = kv_positions >= 0
    if not bool(kept.all()):
        rows = kept.nonzero().squeeze(1)
        key, value, kv_positions = key[rows], value[rows], kv_positions[rows]
    for tokens, cache, scale in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
        flat = cache.view(-1, *cache.shape[2:])
        if cache.dtype == FP8:
            codes = _quantize(tokens.float(), scale, kv_positions)
            flat.view(torch.uint8).index_copy_(0, kv_positions, codes.view(torch.uint8))
        else:
            flat.index_copy_(0, kv_positions, tokens.to(cache.dtype))


def _quantize(tokens: torch.Tensor, scale: KVScale, kv_positions: torch.Tensor) -> torch.Tensor:
    """FP8 [T, Hkv, D] of float32 tokens. A scale per token and head is chosen here and written at its KV position."""
    if isinstance(scale, torch.Tensor):
        chosen = tokens.abs().amax(dim=-1).mul_(1 / FP8_MAX).clamp_(min=MIN_SCALE)
        scale.view(-1, scale.shape[2]).index_copy_(0, kv_positions, chosen)
        scaled = tokens * chosen.reciprocal_().unsqueeze(-1)
    else:
        scaled = tokens * (1 / scale)
    return scaled.clamp_(-FP8_MAX, FP8_MAX).to(FP8)
