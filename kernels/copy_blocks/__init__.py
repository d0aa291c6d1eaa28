"""Copies blocks of the KV cache to other blocks (copy-on-write). `copy_blocks` is the only public call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.copy_blocks import reference
from kernels.devices import has_triton

__all__ = ["copy_blocks"]


def copy_blocks(caches: Sequence[torch.Tensor], pairs: torch.Tensor) -> None:
    """Copy block pairs[i, 0] to block pairs[i, 1] in every cache, all sources read before any destination is written.

    Caches are contiguous [num_blocks, ...] tensors of one device. pairs is int64 [n, 2] on the host; the destinations
    differ from one another.
    """
    if pairs.dtype != torch.int64 or pairs.dim() != 2 or pairs.shape[1] != 2 or pairs.device.type != "cpu":
        raise ValueError(
            f"pairs is {pairs.dtype} {tuple(pairs.shape)} on {pairs.device}, want int64 [n, 2] on the host"
        )
    if len(pairs) == 0 or not caches:
        return
    for cache in caches:
        if not cache.is_contiguous() or cache.device != caches[0].device:
            raise ValueError(
                f"a cache has strides {cache.stride()} on {cache.device}, want contiguous ones on {caches[0].device}"
            )
        if int(pairs.min()) < 0 or int(pairs.max()) >= len(cache):
            raise ValueError(f"pairs name blocks {int(pairs.min())} to {int(pairs.max())} of {len(cache)}")
    sources, destinations = (set(column) for column in pairs.T.tolist())
    if len(destinations) < len(pairs):
        raise ValueError("two pairs have one destination")
    # A block that is read and written needs the reads to be over first, which only the reference promises.
    if caches[0].is_cuda and has_triton() and sources.isdisjoint(destinations):
        from kernels.copy_blocks import triton_kernel

        triton_kernel.copy_blocks(caches, pairs)
    else:
        reference.copy_blocks(caches, pairs)
