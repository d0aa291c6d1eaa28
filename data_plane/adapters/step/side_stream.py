"""A second queue of the device, where shrinks run beside the base model's product of the same input."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


class SideStream(Protocol):
    """What is queued in `forked` runs after everything that was queued before it, and beside what is queued after it.

    Call `join` before anything reads its results. Until then nothing that it reads may be freed or written.
    """

    def forked(self) -> AbstractContextManager[None]:
        """Queue on the second stream while the block runs."""
        ...

    def join(self) -> None:
        """Let everything that is queued from here on wait for the second stream."""
        ...


class CudaSideStream:
    """A stream that forks from the current one by an event and joins it by another, as graphs that are captured allow.

    Memory that is taken in `forked` belongs to this stream. It is given out again to a later fork alone, and that one
    waits for whatever read it on the current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's stubs
        self._forked, self._joined = (torch.cuda.Event() for _ in range(2))  # type: ignore[no-untyped-call]  # torch's stubs

    @contextmanager
    def forked(self) -> Iterator[None]:
        """See SideStream."""
        self._forked.record()
        self._stream.wait_event(self._forked)
        with torch.cuda.stream(self._stream):
            yield
            self._joined.record()

    def join(self) -> None:
        """See SideStream."""
        torch.cuda.current_stream().wait_event(self._joined)
