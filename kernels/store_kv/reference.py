"""store_kv, the definition: one token after the other."""

from __future__ import annotations

import torch


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """key_cache[slot // block_size, slot % block_size] = key[t] for every token t with slot >= 0; value alike."""
    block_size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        key_cache[slot // block_size, slot % block_size] = key[token].to(key_cache.dtype)
        value_cache[slot // block_size, slot % block_size] = value[token].to(value_cache.dtype)
