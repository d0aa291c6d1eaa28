"""store_kv, the definition: one token after the other."""

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
    """key_cache[p // block_size, p % block_size] = key[t] for every token t whose position p is not -1; value alike.

    FP8 caches hold x / scale, rounded to even and at most 448 in size (NaN stays NaN): clamp(x * (1 / scale)). A scale
    per token and head is max(|x|) / 448 over the head's values, at least 2^-64, and is stored beside them.
    """
    block_size = key_cache.shape[1]
    for token, kv_position in enumerate(kv_positions.tolist()):
        if kv_position < 0:
            continue
        place = (kv_position // block_size, kv_position % block_size)
        for tokens, cache, scale in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
            heads = tokens[token]
            if cache.dtype == FP8:
                heads = heads.float()
                if isinstance(scale, torch.Tensor):
                    scale[place] = (heads.abs().amax(dim=-1) * (1 / FP8_MAX)).clamp(min=MIN_SCALE)
                    heads = heads * (1 / scale[place])[:, None]
                else:
                    heads = heads * (1 / scale)
                heads = heads.clamp(-FP8_MAX, FP8_MAX)
            cache[place] = heads.to(cache.dtype)
