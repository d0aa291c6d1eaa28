"""Copies blocks between a cache on the GPU and one in pinned host memory. `swap_blocks` is the only public call."""

from __future__ import annotations

import torch

__all__ = ["swap_blocks"]


def swap_blocks(source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor) -> None:
    """destination[pairs[i, 1]] = source[pairs[i, 0]] for contiguous caches [num_blocks, ...] of one block shape.

    pairs is int64 [n, 2] on the host with different destinations. To or from a GPU the copies are queued on the
    current stream and the host goes on: it may touch its blocks again once the stream got there. Host memory must
    then be pinned. Pairs whose blocks follow one another on both sides are one copy.
    """
    _check(source, destination, pairs)
    for first, count in runs(pairs):
        begin, end = pairs[first].tolist()
        destination[end : end + count].copy_(source[begin : begin + count], non_blocking=True)


def runs(pairs: torch.Tensor) -> list[tuple[int, int]]:
    """(first pair, pairs) of each run in which both columns count up by one: [3 7][4 8][5 2] gives (0, 2) (2, 1)."""
    if len(pairs) == 0:
        return []
    is_cut = (pairs[1:] - pairs[:-1] != 1).any(dim=1)
    starts = [0, *(is_cut.nonzero().flatten() + 1).tolist()]
    return [(start, end - start) for start, end in zip(starts, [*starts[1:], len(pairs)], strict=True)]


def _check(source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor) -> None:
    if pairs.dtype != torch.int64 or pairs.dim() != 2 or pairs.shape[1] != 2 or pairs.device.type != "cpu":
        raise ValueError(
            f"pairs is {pairs.dtype} {tuple(pairs.shape)} on {pairs.device}, want int64 [n, 2] on the host"
        )
    if source.shape[1:] != destination.shape[1:] or source.dtype != destination.dtype:
        raise ValueError(
            f"source {source.dtype} {tuple(source.shape)} and destination {destination.dtype} "
            f"{tuple(destination.shape)} have different blocks"
        )
    for name, cache, blocks in (("source", source, pairs[:, 0]), ("destination", destination, pairs[:, 1])):
        if not cache.is_contiguous():
            raise ValueError(f"{name} must be contiguous, its strides are {cache.stride()}")
        if cache.device.type == "cpu" and (source.is_cuda or destination.is_cuda) and not cache.is_pinned():
            raise ValueError(f"{name} lies in pageable memory; swaps with a GPU need pinned memory")
        if len(blocks) and (int(blocks.min()) < 0 or int(blocks.max()) >= len(cache)):
            raise ValueError(f"pairs name {name} blocks {int(blocks.min())} to {int(blocks.max())} of {len(cache)}")
    if len(set(pairs[:, 1].tolist())) < len(pairs):
        raise ValueError("two pairs have one destination")
    if source.untyped_storage().data_ptr() == destination.untyped_storage().data_ptr():
        raise ValueError("source and destination share memory; copies within one cache are copy_blocks'")
