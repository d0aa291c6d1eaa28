"""Places neither overlap nor are lost, and are free again when nothing refers to them."""

from __future__ import annotations

import random
import threading

import numpy as np

from data_plane.adapters.format.chunk_memory import ALIGNMENT, ChunkMemory, taken_bytes

SIZE = 40 * ALIGNMENT


def test_a_place_is_free_again_when_no_part_of_it_is_referred_to() -> None:
    memory = ChunkMemory(np.zeros(SIZE + 5, dtype=np.uint8))
    place = memory.take(SIZE)
    assert place is not None and len(place) == SIZE and not place.readonly
    assert memory.take(1) is None
    part = np.frombuffer(place, dtype="<i4", count=3, offset=8)
    del place
    assert memory.take(1) is None, "an array refers to it"
    del part
    assert memory.take(SIZE) is not None


def test_gaps_that_touch_become_one() -> None:
    memory = ChunkMemory(np.zeros(SIZE, dtype=np.uint8))
    places = [memory.take(10 * ALIGNMENT) for _ in range(4)]
    assert None not in places and memory.take(1) is None
    places[1] = places[3] = None
    assert memory.take(11 * ALIGNMENT) is None, "two gaps apart from each other"
    places[2] = None
    assert memory.take(30 * ALIGNMENT) is not None


def test_the_smallest_gap_is_taken() -> None:
    memory = ChunkMemory(np.zeros(SIZE, dtype=np.uint8))
    places = [memory.take(count * ALIGNMENT) for count in (20, 1, 5, 14)]
    places[0] = places[2] = None
    small, large = memory.take(4 * ALIGNMENT), memory.take(20 * ALIGNMENT)
    assert small is not None and large is not None and places[1] is not None


def test_places_of_any_sizes_keep_their_bytes_beside_other_threads() -> None:
    memory = ChunkMemory(np.zeros(SIZE, dtype=np.uint8))
    errors: list[str] = []

    def churn(seed: int) -> None:
        rng, held = random.Random(seed), list[tuple[memoryview, bytes]]()
        for number in range(300):
            place = memory.take(rng.randrange(0, 6 * ALIGNMENT))
            if place is not None:
                value = bytes([seed * 50 + number % 50]) * len(place)
                place[:] = value
                held.append((place, value))
            if place is None or len(held) > 4:
                taken, value = held.pop(rng.randrange(len(held))) if held else (memoryview(b""), b"")
                if bytes(taken) != value:
                    errors.append(f"{seed} {number}")

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not errors
    assert memory.take(SIZE) is not None, "nothing is lost"


def test_a_place_takes_whole_units() -> None:
    assert [taken_bytes(size) for size in (0, 1, ALIGNMENT, ALIGNMENT + 1)] == [0, ALIGNMENT, ALIGNMENT, 2 * ALIGNMENT]
