"""Compares a model's recorded layers with its modules, by a prefill and a decode, before the worker attaches."""

from __future__ import annotations

import logging

import torch

from data_plane.engine.kv_cache import KVCache
from data_plane.models.loader import LoadedModel
from data_plane.models.stacking import StackedLayers
from kernels.paged_attention import AttentionBatch

logger = logging.getLogger(__name__)

NUM_TOKENS = 21  # of the prefill: rows of several tiles
# Largest relative error of a token's logits. Sums differ in their order; 16-bit roundings add up over the layers.
_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


@torch.inference_mode()
def check_recorded(loaded: LoadedModel, stacked: StackedLayers, cache: KVCache, max_tokens: int) -> None:
    """Let the layers run as modules if their native program gives other logits. Writes the cache's first blocks.

    If the layers stay native, the direct forward pass is used too, provided that it gives the same bits.
    """
    if not stacked.stack.is_recorded:
        return
    num_blocks, block_size = cache.keys[0].shape[:2]
    room = min(num_blocks * block_size - 1, max_tokens, loaded.context_limit - 1, NUM_TOKENS)
    if room < 1:
        stacked.stack.forget()  # nothing to compare
        return
    native = _logits(loaded, cache, room)
    with stacked.stack.as_modules():
        plain = _logits(loaded, cache, room)
    errors = (native - plain).norm(dim=1) / plain.norm(dim=1).clamp(min=1e-30)
    if bool((errors <= _ERROR[loaded.dtype]).all()):
        direct = stacked.direct
        if direct is not None:
            direct.is_proven = True
            direct.is_proven = torch.equal(_logits(loaded, cache, room), native)
        is_direct = direct is not None and direct.is_proven
        logger.info("layers are native error=%.1e is_direct=%s", float(errors.max()), is_direct)
        return
    logger.warning("layers run as modules: their native program gives other logits error=%.1e", float(errors.max()))
    stacked.stack.forget()


def _logits(loaded: LoadedModel, cache: KVCache, num_tokens: int) -> torch.Tensor:
    """float32 logits [num_tokens + 1, vocab] of a prefill, then of the decode after it."""
    vocab_size = loaded.probe.vocab_size
    token_ids = torch.randint(0, vocab_size, (num_tokens + 1,), generator=torch.Generator().manual_seed(0))
    num_blocks = -(-(num_tokens + 1) // cache.keys[0].shape[1])
    table = torch.arange(num_blocks, dtype=torch.int32)[None]
    positions = torch.arange(num_tokens + 1)
    logits = []
    for begin, end in ((0, num_tokens), (num_tokens, num_tokens + 1)):
        loaded.context.begin(AttentionBatch.build(table, [0, end - begin], [end]), positions[begin:end], None)
        try:
            kept = torch.arange(end - begin)
            logits.append(loaded.logits(token_ids[begin:end], positions[begin:end], kept).float())
        finally:
            loaded.context.end()
    return torch.cat(logits)
