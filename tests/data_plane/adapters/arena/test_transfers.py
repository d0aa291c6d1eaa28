"""Copies of loads beside steps, on a stand-in for CUDA whose copies happen as late as they may."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from data_plane.adapters.arena.transfers import PinnedRing, Transfers

CUDA = torch.device("cuda", 0)


class LateCuda:
    """Work that is queued on a stream is done when somebody waits for it, and not before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = LateStream()
        self.current = self.steps
        self.num_pinned = 0  # buffers
        cuda = SimpleNamespace(
            Event=lambda: LateEvent(self), Stream=lambda _: LateStream(), stream=self.using, current_stream=self.get
        )
        stand_in = SimpleNamespace(empty=self.empty, cuda=cuda, uint8=torch.uint8, from_numpy=torch.from_numpy)
        monkeypatch.setattr("data_plane.adapters.arena.transfers.torch", stand_in)

    def get(self, _: torch.device | None = None) -> LateStream:
        return self.current

    def empty(self, size: int, *, dtype: torch.dtype, pin_memory: bool = False) -> torch.Tensor:
        self.num_pinned += pin_memory
        return torch.empty(size, dtype=dtype)

    @contextmanager
    def using(self, stream: LateStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class LateStream:
    """What is queued, in order: functions to call, and events to wait for."""

    def __init__(self) -> None:
        self.queued: list[Callable[[], object]] = []

    def wait_event(self, event: LateEvent) -> None:
        self.queued.append(event.synchronize)

    def synchronize(self) -> None:
        self.run(len(self.queued))

    def run(self, count: int) -> None:
        """Do what was queued up to there."""
        work, self.queued = self.queued[:count], self.queued[count:]
        for each in work:
            each()


class LateEvent:
    """A place in a stream's queue."""

    def __init__(self, cuda: LateCuda) -> None:
        self._cuda = cuda
        self._is_done = True

    def record(self, stream: LateStream | None = None) -> None:
        self._stream = stream or self._cuda.current
        self._is_done = False
        self._stream.queued.append(self._end)

    def _end(self) -> None:
        self._is_done = True

    def synchronize(self) -> None:
        while not self._is_done:
            self._stream.run(1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> LateCuda:
    return LateCuda(monkeypatch)


def values(number: int, size: int) -> Any:
    return np.full((size, 3), number, dtype="<i2")


def test_a_buffer_is_filled_again_only_when_its_copy_has_ended(cuda: LateCuda) -> None:
    ring, stream, copied = PinnedRing(), LateStream(), list[torch.Tensor]()
    sizes = [5, 9, 2, 9, 30, 1, 30, 7]

    def copy(staged: torch.Tensor) -> None:
        copied.append(staged.clone())

    with cuda.using(stream):
        for number, size in enumerate(sizes):
            staged = ring.fill(values(number, size), torch.int16)
            stream.queued.append(partial(copy, staged))
            ring.queued()
            assert number + 1 - len(copied) == min(number + 1, 2), "one is filled while the other is copied"
    stream.synchronize()
    assert [(len(each), each.unique().tolist()) for each in copied] == [(size, [n]) for n, size in enumerate(sizes)]
    assert cuda.num_pinned == 3, "a buffer grows, and is kept for what is smaller"


def test_values_in_pinned_memory_are_copied_from_where_they_are(
    cuda: LateCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = values(7, 4)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.data_ptr() == kept.ctypes.data)
    ring = PinnedRing()
    assert ring.fill(kept, torch.int16).data_ptr() == kept.ctypes.data
    assert ring.fill(values(7, 4), torch.int16).data_ptr() != kept.ctypes.data
    assert ring.fill(np.frombuffer(kept.tobytes(), "<i2"), torch.int16).tolist() == [7] * 12, "of a source, read only"


def test_of_values_in_pinned_memory_two_copies_are_under_way_at_most(
    cuda: LateCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step uploads waits behind all of them."""
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    ring, stream, copied = PinnedRing(), LateStream(), list[int]()
    with cuda.using(stream):
        for number in range(6):
            ring.fill(values(number, 4), torch.int16)
            stream.queued.append(partial(copied.append, number))
            ring.queued()
            assert number + 1 - len(copied) == min(number + 1, 2)
    assert cuda.num_pinned == 0


def test_a_load_copies_behind_the_steps_that_read_an_evicted_adapter_and_ends_with_its_copies(cuda: LateCuda) -> None:
    transfers, page, seen = Transfers(CUDA), torch.zeros(4), list[float]()
    freed_on: list[LateStream] = []
    freed: Any = SimpleNamespace(record_stream=freed_on.append)
    page.fill_(1)
    cuda.steps.queued.append(lambda: seen.append(float(page.sum())))  # a step that reads the page
    transfers.note_freed(freed)
    cuda.steps.queued.append(lambda: seen.append(-1.0))  # one behind the eviction
    with transfers.load():
        assert transfers.ring is not None and cuda.current is not cuda.steps
        cuda.current.queued.append(lambda: page.fill_(2))
        assert page.sum() == 4, "nothing was copied yet"
    assert seen == [4.0], "the step read the old page, and what came behind it need not have run"
    assert page.sum() == 8, "all copies have ended"
    assert transfers.ring is None and freed_on == [cuda.steps]


def test_loads_at_once_have_streams_of_their_own_and_later_ones_use_these(cuda: LateCuda) -> None:
    transfers = Transfers(CUDA)
    pairs = []
    for _ in range(3):
        with transfers.load():
            outer = cuda.current, transfers.ring
            with transfers.load():
                inner = cuda.current, transfers.ring
        assert outer[0] is not inner[0] and outer[1] is not inner[1]
        pairs.append({outer, inner})
    assert pairs[0] == pairs[1] == pairs[2]


def test_a_load_that_fails_waits_for_its_copies_too(cuda: LateCuda) -> None:
    """Its pages go back to others."""
    transfers, page = Transfers(CUDA), torch.zeros(4)
    with pytest.raises(ValueError, match="a wrong chunk"), transfers.load():
        cuda.current.queued.append(lambda: page.fill_(2))
        raise ValueError("a wrong chunk")
    assert page.sum() == 8
    with transfers.load():
        assert not cuda.current.queued
