"""store_kv as one scatter per cache, for every device that torch runs on."""

from __future__ import annotations

import torch


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See the package. On CUDA it waits for the device once: how many tokens are skipped is data."""
    kept = slot_mapping >= 0
    if not bool(kept.all()):
        rows = kept.nonzero().squeeze(1)
        key, value, slot_mapping = key[rows], value[rows], slot_mapping[rows]
    for tokens, cache in ((key, key_cache), (value, value_cache)):
        flat = cache.view(-1, *cache.shape[2:])
        flat.index_copy_(0, slot_mapping, tokens.to(cache.dtype))
