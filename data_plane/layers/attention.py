"""Attention over the paged KV cache, in the shape that transformers calls it.

Importing this registers the attention implementation "motet" with transformers. No mask is registered beside it, on
purpose: transformers then builds none, and skips the search for packed sequences too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers.modeling_utils import AttentionInterface

from data_plane.layers.context import StepContext
from kernels.fp8 import KVScale
from kernels.paged_attention import Options, attend
from kernels.rope import HeadNorm, apply_rope, apply_rope_and_store_kv
from kernels.store_kv import store_kv

ATTENTION_NAME = "motet"
_ATTRIBUTE = "motet_attention"


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """One layer's arguments for attention, the same in every step."""

    scale: float
    sliding_window: int | None = None  # tokens
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [heads]


@dataclass(frozen=True, slots=True)
class Rotation:
    """Applied to query and key before the key is stored: the norm of each head, the rotation."""

    cos: torch.Tensor  # [num_tokens, n]
    sin: torch.Tensor
    norm: HeadNorm | None


class Attends(Protocol):
    """The cache's side of an attention module that rotates in our kernels."""

    def attend_rotated(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation,
        settings: AttentionSettings,
    ) -> torch.Tensor:
        """[num_tokens, heads, value size] for query, key and value [num_tokens, heads, size], changed in place."""


class PagedAttention:
    """One attention layer's cache; stores the step's keys and values, then attends."""

    def __init__(
        self,
        context: StepContext,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        key_scale: KVScale = 1.0,
        value_scale: KVScale = 1.0,
    ) -> None:
        self.context = context
        self.key_cache = key_cache  # [num_blocks, block_size, kv heads, key size]
        self.value_cache = value_cache  # [num_blocks, block_size, kv heads, value size]
        self.key_scale = key_scale  # see kernels.fp8
        self.value_scale = value_scale
        self._options: tuple[AttentionSettings, Options] | None = None

    def attach(self, module: nn.Module) -> None:
        """Serve the calls of transformers' attention module."""
        attach(module, self)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: AttentionSettings
    ) -> torch.Tensor:
        """[1, num_tokens, heads, value size] for query, key and value [1, heads, num_tokens, size]."""
        self._store(key[0].transpose(0, 1), value[0].transpose(0, 1))
        return self._attend(query[0].transpose(0, 1), settings).unsqueeze(0)

    def attend_rotated(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation,
        settings: AttentionSettings,
    ) -> torch.Tensor:
        """See Attends."""
        tables = (None, rotation.cos, rotation.sin)  # a row for each token
        if self.key_cache.dtype == key.dtype:
            caches = (self.key_cache, self.value_cache, self._kv_positions())
            apply_rope_and_store_kv(query, key, value, *tables, *caches, norm=rotation.norm)
        else:
            apply_rope(query, key, *tables, norm=rotation.norm)
            self._store(key, value)
        return self._attend(query, settings)

    def _store(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write key and value [num_tokens, kv heads, size] to the step's KV positions."""
        caches = (self.key_cache, self.value_cache)
        store_kv(key, value, *caches, self._kv_positions(), self.key_scale, self.value_scale)

    def _kv_positions(self) -> torch.Tensor:
        assert self.context.kv_positions is not None, "no step was begun"
        return self.context.kv_positions

    def _attend(self, query: torch.Tensor, settings: AttentionSettings) -> torch.Tensor:
        assert self.context.attention is not None, "no step was begun"
        options = self._options_of(settings)
        return attend(query, self.key_cache, self.value_cache, self.context.attention, options)

    def _options_of(self, settings: AttentionSettings) -> Options:
        """The layer's options: of one object for the settings, as a fused layer has them, made once."""
        if self._options is None or self._options[0] is not settings:
            options = Options(
                settings.scale,
                settings.sliding_window,
                settings.softcap,
                settings.sinks,
                key_scale=self.key_scale,
                value_scale=self.value_scale,
            )
            self._options = (settings, options)
        return self._options[1]


def attach(module: nn.Module, attention: Attends) -> None:
    """Let `attention` serve the module's calls."""
    setattr(module, _ATTRIBUTE, attention)


def detach(module: nn.Module) -> None:
    """Let go of what was attached, and of its cache."""
    delattr(module, _ATTRIBUTE)


def attention_of(module: nn.Module) -> Attends:
    """What was attached to the module."""
    attention: Attends = getattr(module, _ATTRIBUTE)
    return attention


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
    **_: Any,  # arguments that do not change the result: the probe at load refuses others
) -> tuple[torch.Tensor, None]:
    """What a model's attention module calls; transformers' interface."""
    assert attention_mask is None, "the model made a mask of its own; the probe at load lets none pass"
    layer: PagedAttention = getattr(module, _ATTRIBUTE)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return layer.forward(query, key, value, AttentionSettings(scale, sliding_window, softcap, s_aux)), None


AttentionInterface.register(ATTENTION_NAME, _attention_forward)
