"""LoRA bias and DoRA: in steps with plain adapters, in slots that are filled again, by the byte, and wrong ones."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from data_plane.adapters.arena.transfers import Transfers
from data_plane.adapters.format.paged import Bits
from data_plane.adapters.step.adapter_steps import AdapterSteps
from data_plane.errors import AdapterCorrupt, AdapterLoadError, AdapterMismatch
from tests.data_plane.adapters.factories import (
    TARGETS,
    Packed,
    RandomBase,
    assert_nothing_left,
    expected_output,
    load,
    make_arena,
    pack,
    run_step,
)

FORMS = pytest.mark.usefixtures("lora_form")


@FORMS
def test_one_step_mixes_all_kinds() -> None:
    adapters = {
        0: pack(8),
        1: pack(3, vectors="magnitude", seed=1),
        2: pack(13, vectors="bias", seed=2),
        3: pack({TARGETS[1].name: 4}, vectors="magnitude", seed=3),
    }
    arena = make_arena()
    for slot, packed in adapters.items():
        load(arena, slot, 1, packed)
    for slots in ([0, -1, 3, 2, 1, 1, 0, -1, 2], [1], [2, -1], [3, 0, 3], [0, 0]):
        run_step(arena, slots, adapters)


@FORMS
def test_fused_modules_take_each_its_own_vectors() -> None:
    """Slot 1 has DoRA scales at v alone, slot 2 a bias at all three; q has a bias of its own."""
    names = tuple(target.name for target in TARGETS[:3])
    adapters = {
        0: pack(5),
        1: pack({names[1]: 3}, vectors="magnitude", seed=1),
        2: pack(9, vectors="bias", seed=2),
        3: pack({names[0]: 2}, vectors="magnitude", seed=3),
    }
    arena = make_arena()
    for slot, packed in adapters.items():
        load(arena, slot, 1, packed)
    slots = [0, 1, -1, 2, 3, 1]
    step = AdapterSteps(arena).begin(torch.tensor(slots, dtype=torch.int32), [0, 1, 2, 3])
    assert step is not None
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 32, generator=generator), torch.randn(6, 48 + 16 + 80, generator=generator)
    parts = zip(names, y.split([48, 16, 80], dim=1), strict=True)
    expected = torch.cat([expected_output(name, x, part, slots, adapters) for name, part in parts], dim=1)
    before = y.clone()
    step.apply_group(names, x, y)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-3)
    assert torch.equal(y[2], before[2])


@FORMS
def test_a_slot_keeps_nothing_of_its_last_adapter() -> None:
    """Plain after DoRA after bias after plain, and DoRA of the same generation once all slots were cleared."""
    arena = make_arena()
    for generation, kind in enumerate(("magnitude", "", "bias", "magnitude", "bias", "", "magnitude"), 1):
        packed = pack(4 + generation, vectors=kind, seed=generation)
        load(arena, 2, generation, packed)
        run_step(arena, [2, -1, 2], {2: packed})
        arena.evict(2, generation)
    arena.clear()
    assert_nothing_left(arena)


def test_steps_without_vectors_read_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = make_arena()
    load(arena, 0, 1, pack(4))
    load(arena, 1, 1, pack(4, vectors="magnitude", seed=1))
    load(arena, 2, 1, pack(4, vectors="bias", seed=2))
    load(arena, 3, 1, pack({TARGETS[1].name: 4}, vectors="magnitude", seed=3))
    seen: list[bool] = []

    def add(*_: object, epilogue: object, **__: object) -> None:
        seen.append(epilogue is not None)

    monkeypatch.setattr("data_plane.adapters.step.lora_step.add_lora_group", add)
    for slots in ([0], [1, 0], [2], [0, 3]):
        step = AdapterSteps(arena).begin(torch.tensor(slots, dtype=torch.int32), slots)
        assert step is not None
        step.apply(TARGETS[0].name, torch.zeros(len(slots), 32), torch.zeros(len(slots), 48))
    assert seen == [False, True, True, False]


@FORMS
def test_vectors_count_as_bytes() -> None:
    packed = pack({TARGETS[0].name: 9, TARGETS[6].name: 8}, vectors="magnitude")
    arena = make_arena(arena_bytes=packed.arena_bytes)
    load(arena, 0, 1, packed)
    assert arena.used_bytes() == packed.arena_bytes
    run_step(arena, [0, -1], {0: packed})
    smaller = make_arena(arena_bytes=packed.arena_bytes - 1)
    with pytest.raises(AdapterLoadError, match=f"needs {packed.arena_bytes} bytes"):
        load(smaller, 0, 1, packed)


@FORMS
def test_a_random_walk_of_all_kinds_conserves_bytes_and_results() -> None:
    random = np.random.default_rng(1)
    arena = make_arena(num_slots=5)
    held: dict[int, tuple[int, Packed]] = {}
    for generation in range(1, 33):
        slot = int(random.integers(5))
        if slot in held:
            arena.evict(slot, held.pop(slot)[0])
        names = [target.name for target in TARGETS if random.random() < 0.6] or [TARGETS[0].name]
        kind = ("", "bias", "magnitude")[int(random.integers(3))]
        packed = pack({name: int(random.integers(1, 20)) for name in names}, vectors=kind, seed=generation)
        load(arena, slot, generation, packed)
        held[slot] = (generation, packed)
        assert arena.used_bytes() == sum(packed.arena_bytes for _, packed in held.values())
        arena.check_invariants()
        if generation % 4 == 0:
            chosen = [int(s) for s in random.choice([*held, -1], size=int(random.integers(1, 9)))]
            run_step(arena, chosen, {s: p for s, (_, p) in held.items()}, seed=generation)


def test_a_norm_of_nothing_is_refused_by_adapter_and_module() -> None:
    """B makes one row of W + s B.T A zero: A is the identity there."""
    name = TARGETS[1].name  # 32 -> 16

    def cancel(a: torch.Tensor, b: torch.Tensor) -> None:
        a.copy_(torch.eye(32))
        b.zero_()
        b[:, 5] = -RandomBase().weight(name)[5] / 2.0

    packed = pack({name: 32}, vectors="magnitude", edit=cancel)
    arena = make_arena()
    with pytest.raises(AdapterMismatch, match=rf"{packed.digest}: {name}: output 5 has magnitude .* norm of 0"):
        load(arena, 0, 1, packed)
    assert_nothing_left(arena)


def test_a_norm_that_overflows_is_refused() -> None:
    packed = pack({TARGETS[0].name: 1}, vectors="magnitude", edit=lambda a, b: (a.fill_(1e30), b.fill_(1e30)))
    arena = make_arena()
    with pytest.raises(AdapterMismatch, match=f"{TARGETS[0].name}: output 0 .* norm of inf"):
        load(arena, 0, 1, packed)
    assert_nothing_left(arena)


def test_wrong_vectors_are_refused() -> None:
    good = pack({TARGETS[0].name: 2}, vectors="bias")
    arena = make_arena()
    infinite = pack({TARGETS[0].name: 2}, vectors="bias", edit_vector=lambda vector: vector[3:4].fill_(float("inf")))
    with pytest.raises(AdapterMismatch, match=r"q\.bias holds a value that is not finite"):
        load(arena, 0, 1, infinite)
    other = pack({TARGETS[0].name: 2}, vectors="magnitude")
    with pytest.raises(AdapterCorrupt, match=r"hashes to|has \d+ bytes|are missing or too many"):
        load(arena, 0, 1, Packed(good.digest, good.manifest, other.chunks, {}))
    both = good.manifest.replace(b'"parts":["a","b","bias"]', b'"parts":["a","b","bias","magnitude"]')
    with pytest.raises(AdapterCorrupt, match="no kind of adapter has those"):
        load(arena, 0, 1, Packed(hashlib.sha256(both).hexdigest(), both, good.chunks, {}))
    assert_nothing_left(arena)


def test_the_norm_is_summed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_plane.adapters.kinds.dora.SLICE_BYTES", 5 * 4 * 32)
    packed = pack(7, vectors="magnitude")
    arena = make_arena()
    load(arena, 0, 1, packed)
    run_step(arena, [0, -1], {0: packed})


@FORMS
def test_vectors_are_float32_in_pages_of_bfloat16() -> None:
    """Their sums are rounded once; a bfloat16 DoRA scale would be off by up to 0.4%."""
    target = TARGETS[1]
    adapters = {0: pack(3, vectors="bias", dtype=torch.bfloat16), 1: pack(5, dtype=torch.bfloat16, seed=1)}
    arena = make_arena(dtype=torch.bfloat16)
    for slot, packed in adapters.items():
        load(arena, slot, 1, packed)
        assert arena.used_bytes() == sum(adapters[other].arena_bytes for other in range(slot + 1))
    step = AdapterSteps(arena).begin(torch.tensor([0, 1, -1], dtype=torch.int32), [0, 1])
    assert step is not None
    x = torch.zeros(3, target.in_features, dtype=torch.bfloat16)  # leaves the bias alone
    y = torch.zeros(3, target.out_features, dtype=torch.bfloat16)
    step.apply(target.name, x, y)
    expected = torch.zeros(3, target.out_features)
    expected[0] = 2.0 * adapters[0].vectors[target.name]
    assert torch.equal(y, expected.bfloat16())


class NotingRing:
    """Pinned memory that counts what passes through it."""

    def __init__(self) -> None:
        self.num_bytes = self.num_under_way = 0

    def fill(self, values: Bits, dtype: torch.dtype) -> torch.Tensor:
        self.num_bytes += values.nbytes
        self.num_under_way += 1
        return torch.from_numpy(values.copy()).view(dtype).view(values.shape)

    def queued(self) -> None:
        self.num_under_way -= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vectors", ["", "bias", "magnitude"])
def test_all_of_a_load_passes_through_pinned_memory(
    monkeypatch: pytest.MonkeyPatch, vectors: str, dtype: torch.dtype
) -> None:
    """Beside a GPU. A copy of other memory would hold up the launches of the threads beside it."""
    ring = NotingRing()
    monkeypatch.setattr(Transfers, "ring", ring)
    packed = pack(5, vectors=vectors, dtype=dtype)
    arena = make_arena(dtype=dtype)
    load(arena, 0, 1, packed)
    assert ring.num_bytes == packed.arena_bytes and ring.num_under_way == 0
    if dtype == torch.float32:
        run_step(arena, [0, -1], {0: packed})
