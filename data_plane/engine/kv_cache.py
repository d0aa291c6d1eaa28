"""The paged KV cache of all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from data_plane.errors import ConfigError
from data_plane.models.attention_checks import AttentionLayer
from data_plane.plan import Int32Array
from kernels.copy_blocks import copy_blocks
from kernels.devices import upload
from kernels.fp8 import FP8, KVScale, fp8_refusal


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How keys and values are stored."""

    dtype: torch.dtype
    has_token_scales: bool = False  # FP8 with a float32 scale for each token and head, of keys and of values

    @classmethod
    def of(cls, name: str, model_dtype: torch.dtype, device: torch.device) -> KVFormat:
        """The format of a --kv-cache-dtype. Raises ConfigError where the device cannot read it."""
        if name == "auto":
            return cls(model_dtype)
        refusal = fp8_refusal(device)
        if refusal is not None:
            raise ConfigError(f"--kv-cache-dtype {name}: {refusal}; use auto")
        return cls(FP8, has_token_scales=name == "fp8_per_token_head")

    def block_bytes(self, layers: Sequence[AttentionLayer], block_size: int) -> int:
        """Bytes of one block over all layers."""
        scale_bytes = 2 * torch.float32.itemsize if self.has_token_scales else 0
        return sum(
            layer.num_kv_heads * ((layer.key_dim + layer.value_dim) * self.dtype.itemsize + scale_bytes) * block_size
            for layer in layers
        )


class KVCache:
    """Keys and values of every layer. Block i of each layer belongs to block id i."""

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        *,
        num_blocks: int,
        block_size: int,
        kv_format: KVFormat,
        device: torch.device,
    ) -> None:
        def zeros(layer: AttentionLayer, dim: int) -> torch.Tensor:
            return torch.zeros(num_blocks, block_size, layer.num_kv_heads, dim, dtype=kv_format.dtype, device=device)

        def scale(layer: AttentionLayer) -> KVScale:
            if not kv_format.has_token_scales:
                return 1.0
            return torch.zeros(num_blocks, block_size, layer.num_kv_heads, device=device)

        self.keys = [zeros(layer, layer.key_dim) for layer in layers]
        self.values = [zeros(layer, layer.value_dim) for layer in layers]
        self.key_scales = [scale(layer) for layer in layers]  # see kernels.fp8
        self.value_scales = [scale(layer) for layer in layers]
        # Blocks that may hold values that are not finite, left by a row without finite logits.
        self._is_dirty = np.zeros(num_blocks, dtype=np.bool_)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors with a part of each block, [num_blocks, ...] each."""
        scales = [scale for scale in (*self.key_scales, *self.value_scales) if isinstance(scale, torch.Tensor)]
        return [*self.keys, *self.values, *scales]

    def copy_blocks(self, copies: Int32Array) -> None:
        """Copy blocks (source, destination), all sources read before any destination is written."""
        copy_blocks(self.tensors, torch.from_numpy(copies.astype("int64").reshape(-1, 2)))

    def mark_dirty(self, block_ids: Int32Array) -> None:
        """Remember that these blocks may hold values that are not finite.

        The values stay: the blocks may be in the control plane's prefix cache, and a request that starts from them must
        fail as it would if it computed them.
        """
        self._is_dirty[block_ids] = True

    def dirty_of(self, block_ids: Int32Array) -> Int32Array:
        """The blocks among these that may hold values that are not finite."""
        return block_ids[self._is_dirty[block_ids]]

    def make_finite(self, block_ids: Int32Array) -> None:
        """Replace values that are not finite by zero, before a row fills the blocks.

        Attention masks the old entries by weights of zero, and zero times NaN is NaN.
        """
        self._is_dirty[block_ids] = False
        index = upload(block_ids.astype(np.int64), self.keys[0].device)
        for cache in self.tensors:
            if cache.dtype == FP8:
                codes = cache.view(torch.uint8)  # NaN is 127 with either sign, and there is no infinity
                blocks = codes[index]
                codes[index] = blocks.masked_fill_(blocks & 127 == 127, 0)
            else:
                cache[index] = cache[index].nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
