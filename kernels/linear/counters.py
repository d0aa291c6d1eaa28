"""Counters by which the programs of a launch tell which of them ends last. They are zero between launches.

Launches of one stream follow one another and share them; each stream has its own. A graph has those of the stream it
was recorded on: two graphs that were recorded on one stream must not run at the same time.
"""

from __future__ import annotations

import torch

MAX_COUNTERS = 1024  # of a launch
STREAMS = 64  # as many as torch has in its pools; more streams take a table of their own

by_stream: dict[tuple[int, int], torch.Tensor] = {}
free_by_device: dict[int, list[torch.Tensor]] = {}  # by device


def zero_counters(x: torch.Tensor, stream: int) -> torch.Tensor:
    """int32 [MAX_COUNTERS] on the device of x for a launch on the stream, its handle; the launch leaves zeros."""
    device = x.get_device()
    counters = by_stream.get((device, stream))
    return _counters_of_new(x, device, stream) if counters is None else counters


def _counters_of_new(x: torch.Tensor, device: int, stream: int) -> torch.Tensor:
    free = free_by_device.setdefault(device, [])
    if not free:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            # Nothing may be written outside the graph meanwhile: its own counters are cleared by each replay.
            return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=x.device)
        free.extend(torch.zeros(STREAMS, MAX_COUNTERS, dtype=torch.int32, device=x.device).unbind())
        if x.is_cuda:
            torch.cuda.current_stream(x.device).synchronize()  # other streams use them next
    return by_stream.setdefault((device, stream), free.pop())
