"""Copies of adapters to a GPU beside its steps: a stream and a ring of pinned memory for each load under way.

Pages that an eviction freed may still be read by steps that were submitted before it. The eviction leaves an event on
the stream of the steps, and a load's copies wait for the last of these events. The load ends when its copies have: so
whatever is submitted later sees them. On a CPU nothing is queued, and none of this is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from data_plane.adapters.format.paged import Bits

NUM_BUFFERS = 2  # one is filled while the other is copied


class PinnedRing:
    """Pinned memory that chunks pass through on their way to a GPU."""

    def __init__(self) -> None:
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(NUM_BUFFERS)]
        self._copied: list[torch.cuda.Event | None] = [None] * NUM_BUFFERS  # after it the buffer may be filled again
        self._next = 0

    def fill(self, values: Bits, dtype: torch.dtype) -> torch.Tensor:
        """The values in pinned memory, until the second `fill` after this one. Call `queued` behind their copy.

        Values that lie in such memory already are taken from there. Either way at most NUM_BUFFERS copies of a load are
        under way: what a step uploads waits behind them.
        """
        if (event := self._copied[self._next]) is not None:
            event.synchronize()
        if values.flags.writeable and values.flags.c_contiguous:
            kept = torch.from_numpy(values)
            if kept.is_pinned():
                return kept.view(dtype)
        if len(self._buffers[self._next]) < values.nbytes:
            self._buffers[self._next] = torch.empty(values.nbytes, dtype=torch.uint8, pin_memory=True)
        filled = self._buffers[self._next][: values.nbytes]
        filled.numpy().view(values.dtype).reshape(values.shape)[...] = values
        return filled.view(dtype).view(values.shape)

    def queued(self) -> None:
        """The copy of the values is queued on the current stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's stubs
        event.record()
        self._copied[self._next] = event
        self._next = (self._next + 1) % NUM_BUFFERS


class Transfers:
    """The streams of one arena's loads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._freed: torch.cuda.Event | None = None
        self._idle: list[tuple[torch.cuda.Stream, PinnedRing]] = []  # of loads that ended
        self._own = threading.local()

    @property
    def ring(self) -> PinnedRing | None:
        """That of this thread's load; None on a CPU."""
        ring: PinnedRing | None = getattr(self._own, "ring", None)
        return ring

    def note_freed(self, *tensors: torch.Tensor) -> None:
        """Steps submitted so far may read what is given back after this call, and these tensors. Compute thread."""
        if self._device.type != "cuda":
            return
        current = torch.cuda.current_stream(self._device)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's stubs
        event.record(current)
        for tensor in tensors:
            tensor.record_stream(current)
        with self._lock:
            self._freed = event

    @contextmanager
    def load(self) -> Iterator[None]:
        """The copies of one load, whose pages are reserved. All of them have ended when the block has."""
        if self._device.type != "cuda":
            yield
            return
        with self._lock:
            freed = self._freed
            lane = self._idle.pop() if self._idle else None
        stream, ring = lane or (torch.cuda.Stream(self._device), PinnedRing())  # type: ignore[no-untyped-call]  # torch's stubs
        self._own.ring = ring
        try:
            with torch.cuda.stream(stream):
                if freed is not None:
                    stream.wait_event(freed)
                yield
        finally:
            stream.synchronize()
            self._own.ring = None
            with self._lock:
                self._idle.append((stream, ring))
