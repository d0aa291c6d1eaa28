"""Copies of a step's tokens from the device to the host, which the step does not wait for."""

from __future__ import annotations

import threading
from typing import Protocol

import numpy as np
import torch

from data_plane.engine.rows import BoolArray
from data_plane.plan import Int32Array


class ResultCopy(Protocol):
    """Tokens and flags of one step on their way to the host."""

    def is_done(self) -> bool:
        """Whether `read` returns at once. Does not wait for a device."""
        ...

    def read(self) -> tuple[Int32Array, BoolArray]:
        """Tokens int32 [n], and whether the logits of each were finite, bool [n]. Waits for the device. Thread-safe."""
        ...


class ResultCopies(Protocol):
    """Starts copies. One thread."""

    def start(self, tokens: torch.Tensor, finite: torch.Tensor) -> ResultCopy:
        """Copy tokens int64 [n] and finite bool [n], as they are once the work that was queued before has ended."""
        ...


def result_copies(device: torch.device, *, most: int) -> ResultCopies:
    """The copies that a device takes, of at most `most` tokens each."""
    return _PinnedCopies(most) if device.type == "cuda" else HostCopies()


class HostCopies:
    """Copies of a device whose work has ended when its call returns: a CPU."""

    def start(self, tokens: torch.Tensor, finite: torch.Tensor) -> ResultCopy:
        return _Read(tokens.numpy().astype(np.int32), finite.numpy())


class _Read:
    """Results that are on the host."""

    def __init__(self, tokens: Int32Array, finite: BoolArray) -> None:
        self._results = tokens, finite

    def is_done(self) -> bool:
        return True

    def read(self) -> tuple[Int32Array, BoolArray]:
        return self._results


class _PinnedCopies:
    """Copies by one transfer each into pinned memory, which is taken again when the copy was read."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._free: list[torch.Tensor] = []  # int64 [2 * most] each; append and pop need no lock

    def start(self, tokens: torch.Tensor, finite: torch.Tensor) -> ResultCopy:
        buffer = self._free.pop() if self._free else torch.empty(2 * self._most, dtype=torch.int64, pin_memory=True)
        buffer[: 2 * len(tokens)].view(2, -1).copy_(torch.stack([tokens, finite.to(tokens.dtype)]), non_blocking=True)
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch's stubs
        event.record()
        return _PinnedCopy(buffer, len(tokens), event, self._free)


class _PinnedCopy:
    def __init__(self, buffer: torch.Tensor, count: int, event: torch.cuda.Event, free: list[torch.Tensor]) -> None:
        self._buffer = buffer
        self._count = count
        self._event = event
        self._free = free
        self._lock = threading.Lock()
        self._results: tuple[Int32Array, BoolArray] | None = None

    def is_done(self) -> bool:
        return self._results is not None or self._event.query()  # type: ignore[no-untyped-call]  # torch's stubs

    def read(self) -> tuple[Int32Array, BoolArray]:
        with self._lock:
            if self._results is None:
                self._event.synchronize()
                both = self._buffer[: 2 * self._count].view(2, -1).numpy()
                self._results = both[0].astype(np.int32), both[1].astype(np.bool_)
                self._free.append(self._buffer)
            return self._results
