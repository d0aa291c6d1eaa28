"""Loads on threads beside the compute thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from data_plane.adapters.arena.adapter_arena import AdapterArena
from data_plane.errors import (
    AdapterLoadError,
    StaleSlot,
)
from tests.data_plane.adapters.factories import (
    TARGETS,
    Packed,
    begin_step,
    load,
    make_arena,
    pack,
    run_step,
)


class GatedSource:
    """Waits before the last chunk until it is let go."""

    def __init__(self, packed: Packed) -> None:
        self.packed = packed
        self.is_waiting = threading.Event()
        self.may_go_on = threading.Event()

    def open(self, digest: str) -> tuple[bytes, Iterator[bytes]]:
        return self.packed.manifest, self._chunks()

    def _chunks(self) -> Iterator[bytes]:
        yield from self.packed.chunks[:-1]
        self.is_waiting.set()
        assert self.may_go_on.wait(10)
        yield self.packed.chunks[-1]


class LoadThread(threading.Thread):
    """A load on a thread of its own that stops before the last chunk."""

    def __init__(self, arena: AdapterArena, slot: int, generation: int, packed: Packed) -> None:
        super().__init__()
        self.source = GatedSource(packed)
        self.error: BaseException | None = None
        self._arguments = (arena, slot, generation, packed.digest)
        self.start()
        assert self.source.is_waiting.wait(10)

    def run(self) -> None:
        arena, slot, generation, digest = self._arguments
        try:
            arena.load(slot, generation, digest, self.source)
        except BaseException as error:
            self.error = error

    def finish(self) -> None:
        self.source.may_go_on.set()
        self.join(10)


def test_half_a_load_is_never_visible() -> None:
    other, packed = pack(8, seed=1), pack(8)
    arena = make_arena()
    load(arena, 1, 1, other)
    loading = LoadThread(arena, 0, 1, packed)
    with pytest.raises(StaleSlot, match="slot 0 is not ready"):
        arena.check(0, 1)
    with pytest.raises(StaleSlot, match="slot 0 is not ready"):
        begin_step(arena, [0])
    assert arena.paged_module(TARGETS[0].name).rank[0] == 0
    run_step(arena, [1, -1], {1: other})
    with pytest.raises(AdapterLoadError, match="not empty"):
        load(arena, 0, 2, other)
    loading.finish()
    assert loading.error is None
    run_step(arena, [1, 0], {0: packed, 1: other})


@pytest.mark.parametrize("how", ["evict", "clear"])
def test_cancelled_load_gives_its_pages_back(how: str) -> None:
    arena = make_arena(arena_bytes=2 * pack(8).arena_bytes)
    loading = LoadThread(arena, 0, 1, pack(8))
    if how == "evict":
        arena.evict(0, 1)
    else:
        arena.clear()
    # The slot is free at once, the pages only when the loader has stopped writing.
    successor = pack(8, seed=1)
    load(arena, 0, 2, successor)
    assert arena.used_bytes() == 2 * successor.arena_bytes
    loading.finish()
    assert isinstance(loading.error, AdapterLoadError)
    assert "cancelled" in str(loading.error)
    assert arena.used_bytes() == successor.arena_bytes
    run_step(arena, [0], {0: successor})
    arena.check_invariants()


def test_four_threads_load_while_steps_go_on() -> None:
    """Each thread rotates 12 adapters through its own slot; the steps keep naming slot 4."""
    num_slots, rounds = 5, 12
    arena = make_arena(num_slots=num_slots, arena_bytes=5 * pack(16).arena_bytes)
    resident = pack(16, seed=1000)
    load(arena, 4, 1, resident)
    adapters = {
        (slot, index): pack(1 + (slot + index) % 16, seed=slot * 100 + index)
        for slot in range(4)
        for index in range(rounds)
    }
    ready: list[tuple[int, int]] = []
    may_load = [threading.Semaphore(1) for _ in range(4)]
    changed_ready = threading.Condition()
    errors: list[BaseException] = []

    def rotate(slot: int) -> None:
        try:
            for index in range(rounds):
                assert may_load[slot].acquire(timeout=20)
                load(arena, slot, index + 1, adapters[slot, index])
                with changed_ready:
                    ready.append((slot, index))
                    changed_ready.notify()
        except BaseException as error:
            errors.append(error)
            with changed_ready:
                changed_ready.notify()

    threads = [threading.Thread(target=rotate, args=(slot,)) for slot in range(4)]
    for thread in threads:
        thread.start()
    for number in range(4 * rounds):
        with changed_ready:
            assert changed_ready.wait_for(lambda: ready or errors, timeout=20)
            assert not errors
            slot, index = ready.pop()
        arena.check(slot, index + 1)
        run_step(arena, [4, slot, -1, slot], {4: resident, slot: adapters[slot, index]}, seed=number)
        arena.evict(slot, index + 1)
        may_load[slot].release()
    for thread in threads:
        thread.join(20)
    assert not errors
    assert arena.used_bytes() == resident.arena_bytes
    arena.check_invariants()
