"""Bytes of the arena."""

from __future__ import annotations

import numpy as np
import pytest

from data_plane.errors import ArenaFull
from tests.data_plane.adapters.factories import (
    TARGETS,
    Packed,
    assert_nothing_left,
    load,
    make_arena,
    pack,
    run_step,
)


def test_adapter_of_exactly_the_arenas_bytes_fits() -> None:
    packed = pack({"model.layers.0.q": 9, "model.layers.1.down": 64})
    arena = make_arena(arena_bytes=packed.arena_bytes)
    load(arena, 0, 1, packed)
    assert arena.used_bytes() == packed.arena_bytes
    run_step(arena, [0], {0: packed})


def test_full_arena_names_the_bytes() -> None:
    packed = pack(8)
    arena = make_arena(arena_bytes=packed.arena_bytes * 2 - 1)
    load(arena, 0, 1, packed)
    with pytest.raises(ArenaFull, match=f"needs {packed.arena_bytes} bytes"):
        load(arena, 1, 1, packed)
    arena.evict(0, 1)
    assert_nothing_left(arena)


def test_fragmented_arena_still_takes_what_its_bytes_hold() -> None:
    small = [pack(8, seed=index) for index in range(8)]
    arena = make_arena(num_slots=9, arena_bytes=8 * small[0].arena_bytes)
    for slot, packed in enumerate(small):
        load(arena, slot, 1, packed)
    for slot in range(0, 8, 2):
        arena.evict(slot, 1)
    large = pack(32, seed=77)
    load(arena, 8, 1, large)
    assert arena.used_bytes() == 8 * small[0].arena_bytes
    run_step(arena, [8, 1, 3], {8: large, 1: small[1], 3: small[3]})


def test_random_walk_conserves_bytes_and_results() -> None:
    random = np.random.default_rng(0)
    arena = make_arena(num_slots=6, arena_bytes=4 * pack(24).arena_bytes)
    held: dict[int, tuple[int, Packed]] = {}
    num_full = 0
    for step in range(400):
        slot = int(random.integers(6))
        generation = step + 1
        if slot in held and random.random() < 0.6:
            arena.evict(slot, held.pop(slot)[0])
        elif slot not in held:
            names = [target.name for target in TARGETS if random.random() < 0.7] or [TARGETS[0].name]
            packed = pack({name: int(random.integers(1, 65)) for name in names}, seed=step)
            try:
                load(arena, slot, generation, packed)
                held[slot] = (generation, packed)
            except ArenaFull:
                num_full += 1
                assert arena.used_bytes() + packed.arena_bytes > 4 * pack(24).arena_bytes
        assert arena.used_bytes() == sum(packed.arena_bytes for _, packed in held.values())
        arena.check_invariants()
        if held and step % 4 == 0:
            chosen = [int(s) for s in random.choice([*held, -1], size=int(random.integers(1, 9)))]
            run_step(arena, chosen, {s: p for s, (_, p) in held.items()}, seed=step)
    assert num_full > 10
    arena.clear()
    assert arena.used_bytes() == 0
    arena.check_invariants()
