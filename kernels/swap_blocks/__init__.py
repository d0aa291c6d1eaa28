"""Copies blocks between caches on a device and others in host memory. `BlockSwaps` is the only public name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.devices import has_triton
from kernels.swap_blocks import reference

__all__ = ["BlockSwaps"]


class BlockSwaps:
    """Moves blocks of caches to host memory and back: one launch for all caches and blocks of a move.

    caches: contiguous [num_blocks, ...] tensors of one device. hosts: for each cache one with the same block shape and
    dtype in host memory, pinned where the device is a GPU. Both keep their memory for the life of this object.
    """

    def __init__(self, caches: Sequence[torch.Tensor], hosts: Sequence[torch.Tensor]) -> None:
        _check_caches(caches, hosts)
        self._caches, self._hosts = list(caches), list(hosts)
        self._num_blocks, self._num_host_blocks = (min(len(cache) for cache in side) for side in (caches, hosts))
        self._is_triton = self._caches[0].is_cuda and has_triton()
        if self._is_triton:
            from kernels.swap_blocks import triton_kernel

            self._moves = triton_kernel.Moves(self._caches, self._hosts)

    def swap_out(self, pairs: torch.Tensor) -> None:
        """host[pairs[i, 1]] = cache[pairs[i, 0]] in every cache.

        pairs is int64 [n, 2] on the host with different destinations. On a GPU the move is queued on the current stream
        and the host goes on: it may touch its blocks again once the stream got there.
        """
        _check_pairs(pairs, self._num_blocks, self._num_host_blocks)
        self._move(self._caches, self._hosts, pairs, is_out=True)

    def swap_in(self, pairs: torch.Tensor) -> None:
        """cache[pairs[i, 1]] = host[pairs[i, 0]] in every cache, as `swap_out` does."""
        _check_pairs(pairs, self._num_host_blocks, self._num_blocks)
        self._move(self._hosts, self._caches, pairs, is_out=False)

    def _move(
        self,
        sources: Sequence[torch.Tensor],
        destinations: Sequence[torch.Tensor],
        pairs: torch.Tensor,
        *,
        is_out: bool,
    ) -> None:
        if len(pairs) == 0:
            return
        if self._is_triton:
            self._moves.move(pairs, is_out=is_out)
        else:
            reference.swap_blocks(sources, destinations, pairs)


def _check_caches(caches: Sequence[torch.Tensor], hosts: Sequence[torch.Tensor]) -> None:
    if not caches or len(caches) != len(hosts):
        raise ValueError(f"{len(caches)} caches and {len(hosts)} in host memory, want as many of both and at least one")
    for cache, host in zip(caches, hosts, strict=True):
        if cache.shape[1:] != host.shape[1:] or cache.dtype != host.dtype:
            raise ValueError(
                f"cache {cache.dtype} {tuple(cache.shape)} and host memory {host.dtype} {tuple(host.shape)} have "
                "different blocks"
            )
        for name, tensor in (("cache", cache), ("host memory", host)):
            if not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous, its strides are {tensor.stride()}")
        if cache.device != caches[0].device or host.device.type != "cpu":
            raise ValueError(
                f"a cache is on {cache.device} and its host memory on {host.device}, want {caches[0].device} and the "
                "host"
            )
        if cache.is_cuda and not host.is_pinned():
            raise ValueError("host memory is pageable; swaps with a GPU need pinned memory")
        if cache.untyped_storage().data_ptr() == host.untyped_storage().data_ptr():
            raise ValueError("cache and host memory share memory; copies within one cache are copy_blocks'")


def _check_pairs(pairs: torch.Tensor, num_sources: int, num_destinations: int) -> None:
    if pairs.dtype != torch.int64 or pairs.dim() != 2 or pairs.shape[1] != 2 or pairs.device.type != "cpu":
        raise ValueError(
            f"pairs is {pairs.dtype} {tuple(pairs.shape)} on {pairs.device}, want int64 [n, 2] on the host"
        )
    if len(pairs) == 0:
        return
    for name, blocks, count in (
        ("source", pairs[:, 0], num_sources),
        ("destination", pairs[:, 1], num_destinations),
    ):
        least, most = (int(value) for value in blocks.aminmax())
        if least < 0 or most >= count:
            raise ValueError(f"pairs name {name} blocks {least} to {most} of {count}")
    if len(set(pairs[:, 1].tolist())) < len(pairs):
        raise ValueError("two pairs have one destination")
