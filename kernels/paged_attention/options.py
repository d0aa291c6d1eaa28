"""The options of a layer's attention beside softmax(scale q . k) v: one object for all implementations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kernels.fp8 import KVScale, scale_spec
from kernels.tensor_spec import TensorSpec, spec_of


@dataclass(frozen=True, slots=True)
class BlockSparsity:
    """Each query sees the last few blocks of keys, and every n-th block before them. The server does not use it yet.

    Key block b is seen from query block q if b > q - local_blocks, or if (b + offset of the head) is a multiple of
    vertical_stride. As in the phi-3-small models; the blocks are counted from the sequence's start.
    """

    block_size: int  # tokens; need not be that of the cache
    local_blocks: int  # the query's own block among them
    vertical_stride: int  # blocks
    # Blocks by which the vertical ones move from each query head to the next; if negative, from each key head.
    head_sliding_step: int = 0

    def __post_init__(self) -> None:
        for name in ("block_size", "local_blocks", "vertical_stride"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, want at least 1")

    def offsets(self, num_heads: int, num_kv_heads: int) -> torch.Tensor:
        """int64 [Hq]: each head's offset."""
        heads = torch.arange(num_heads)
        if self.head_sliding_step < 0:
            heads = heads // (num_heads // num_kv_heads)
        return heads * abs(self.head_sliding_step) + 1

    def sees(self, query_pos: torch.Tensor, key_pos: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Which keys the pattern shows, later ones too; the arguments are broadcast."""
        query_block, key_block = query_pos // self.block_size, key_pos // self.block_size
        is_vertical = (key_block + offsets) % self.vertical_stride == 0
        return (key_block > query_block - self.local_blocks) | is_vertical


class OptionSizes(NamedTuple):
    """Options as plain data."""

    scale: float
    sliding_window: int | None
    softcap: float | None
    sinks: TensorSpec | None
    alibi_slopes: TensorSpec | None
    sparsity: BlockSparsity | None
    key_scale: float | TensorSpec
    value_scale: float | TensorSpec

    def check(self, num_heads: int) -> None:
        """Raise ValueError for a value out of range."""
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window is {self.sliding_window}, want at least 1 or None")
        if self.sliding_window is not None and self.sparsity is not None:
            raise ValueError("sliding_window and sparsity are both given, want one of them")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap is {self.softcap}, want more than 0 or None")
        for name, per_head in (("sinks", self.sinks), ("alibi_slopes", self.alibi_slopes)):
            if per_head is not None and (per_head.shape != (num_heads,) or not per_head.dtype.is_floating_point):
                raise ValueError(f"{name} is {per_head.dtype} {tuple(per_head.shape)}, want floats [{num_heads}]")


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """See `paged_attention`. One object serves all steps of a layer."""

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [Hq]
    alibi_slopes: torch.Tensor | None = None  # [Hq]; the server does not use them yet
    sparsity: BlockSparsity | None = None
    key_scale: KVScale = 1.0
    value_scale: KVScale = 1.0
    sizes: OptionSizes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        sinks, slopes = (None if each is None else spec_of(each) for each in (self.sinks, self.alibi_slopes))
        scales = (scale_spec(self.key_scale), scale_spec(self.value_scale))
        numbers = (self.scale, self.sliding_window, self.softcap)
        object.__setattr__(self, "sizes", OptionSizes(*numbers, sinks, slopes, self.sparsity, *scales))
