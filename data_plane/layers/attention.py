"""Attention over the paged KV cache, in the shape that transformers calls it.

Importing this registers the attention implementation "motet" with transformers. No mask is registered beside it, on
purpose: transformers then builds none, and skips the search for packed sequences too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import AttentionInterface

from data_plane.layers.context import StepContext
from kernels.paged_attention import paged_attention
from kernels.store_kv import store_kv

ATTENTION_NAME = "motet"
_ATTRIBUTE = "motet_attention"


class PagedAttention:
    """One attention layer's cache; stores the step's keys and values, then attends."""

    def __init__(self, context: StepContext, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
        self.context = context
        self.key_cache = key_cache  # [num_blocks, block_size, kv heads, key size]
        self.value_cache = value_cache  # [num_blocks, block_size, kv heads, value size]

    def attach(self, module: nn.Module) -> None:
        """Serve the calls of transformers' attention module."""
        setattr(module, _ATTRIBUTE, self)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """[1, num_tokens, heads, value size] for query, key and value [1, heads, num_tokens, size]."""
        context = self.context
        assert context.attention is not None and context.slot_mapping is not None, "no step was begun"
        store_kv(
            key[0].transpose(0, 1), value[0].transpose(0, 1), self.key_cache, self.value_cache, context.slot_mapping
        )
        return paged_attention(
            query[0].transpose(0, 1),
            self.key_cache,
            self.value_cache,
            context.attention,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
        ).unsqueeze(0)


def _attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,  # what else models pass does not change the result; the probe at load refuses what would
) -> tuple[torch.Tensor, None]:
    """What a model's attention module calls; transformers' interface."""
    assert attention_mask is None, "the model made a mask of its own; the probe at load lets none pass"
    layer: PagedAttention = getattr(module, _ATTRIBUTE)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return layer.forward(query, key, value, scale, sliding_window, softcap, s_aux), None


AttentionInterface.register(ATTENTION_NAME, _attention_forward)
