"""What a step computes: each token with the adapter of its slot and no other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from data_plane.adapters.step.adapter_steps import AdapterSteps
from data_plane.errors import (
    AdapterLoadError,
    StaleSlot,
)
from kernels.lora import reference
from tests.data_plane.adapters.factories import (
    TARGETS,
    Packed,
    begin_step,
    expected_delta,
    load,
    make_arena,
    pack,
    run_step,
)


@pytest.mark.usefixtures("lora_form")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mixed_step_equals_the_packed_matrices(dtype: torch.dtype) -> None:
    adapters = {slot: pack(rank, seed=slot, dtype=dtype) for slot, rank in enumerate((1, 8, 13, 64))}
    arena = make_arena(dtype=dtype)
    for slot, packed in adapters.items():
        load(arena, slot, slot + 1, packed)
    if dtype == torch.float32:
        run_step(arena, [0, -1, 3, 2, 1, 1, 0], adapters)
        return
    slots = [0, -1, 3, 2]
    step = AdapterSteps(arena).begin(torch.tensor(slots, dtype=torch.int32), [0, 2, 3])
    assert step is not None
    x, y = torch.randn(4, 32).to(dtype), torch.zeros(4, 48).to(dtype)
    step.apply("model.layers.0.q", x, y)
    expected = expected_delta("model.layers.0.q", x, slots, adapters)
    torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2.0)  # values of order 100


def test_table_on_the_device_equals_the_packed_matrices() -> None:
    """The slot table that device kernels read, through the reference that reads pages."""
    adapters = {slot: pack({TARGETS[slot].name: 3, TARGETS[5].name: 5 + 9 * slot}, seed=slot) for slot in range(4)}
    arena = make_arena()
    for slot in (2, 0, 3, 1):
        load(arena, slot, 1, adapters[slot])
    arena.evict(0, 1)
    load(arena, 0, 2, adapters[0])
    slots = [0, 1, -1, 2, 3, 3]
    token_slots = torch.tensor(slots, dtype=torch.int32)
    for target in TARGETS:
        x, y = torch.randn(6, target.in_features), torch.zeros(6, target.out_features)
        reference.add_lora(y, x, arena.paged_module(target.name), token_slots)
        torch.testing.assert_close(y, expected_delta(target.name, x, slots, adapters), rtol=1e-4, atol=1e-3)


def test_table_keeps_its_addresses() -> None:
    small, large, again = pack(8), pack(16, seed=1), pack(8, seed=2)
    arena = make_arena(arena_bytes=2 * small.arena_bytes + large.arena_bytes)
    target = TARGETS[0].name
    load(arena, 0, 1, small)
    load(arena, 1, 1, small)
    before = [tensor.data_ptr() for tensor in (arena.paged_module(target).page_ids, arena.paged_module(target).rank)]
    load(arena, 2, 1, large)
    arena.paged_module(target)
    arena.evict(1, 1)
    load(arena, 3, 1, again)
    after = [tensor.data_ptr() for tensor in (arena.paged_module(target).page_ids, arena.paged_module(target).rank)]
    assert before == after
    adapters = {0: small, 2: large, 3: again}
    slots = [0, 2, 3]
    token_slots = torch.tensor(slots, dtype=torch.int32)
    x, y = torch.randn(3, 32), torch.zeros(3, 48)
    reference.add_lora(y, x, arena.paged_module(target), token_slots)
    torch.testing.assert_close(y, expected_delta(target, x, slots, adapters), rtol=1e-4, atol=1e-3)


def test_adapters_that_come_and_go_never_rewrite_the_others() -> None:
    """A nearly full arena, adapters of three sizes: each load writes its own entries alone."""
    sizes = [pack(rank, seed=rank) for rank in (8, 16, 32)]
    arena = make_arena(arena_bytes=4 * max(size.arena_bytes for size in sizes))
    generator = np.random.default_rng(3)
    resident: list[int] = []
    generations: dict[int, int] = {}
    for generation in range(1, 120):
        if len(resident) == 4:
            slot = resident.pop(int(generator.integers(4)))
            arena.evict(slot, generations[slot])
        else:
            slot = len(resident)
        load(arena, slot, generation, sizes[int(generator.integers(3))])
        generations[slot] = generation
        resident.append(slot)
    arena.paged_module(TARGETS[0].name)
    assert arena.table.num_compactions == 0


def test_a_list_of_pages_without_a_gap_is_compacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_plane.adapters.arena.slots.ROOM", 1)
    small, large, again = pack(8), pack(16, seed=1), pack(8, seed=2)
    arena = make_arena(arena_bytes=small.arena_bytes + large.arena_bytes)
    load(arena, 0, 1, again)
    load(arena, 1, 1, small)
    arena.paged_module(TARGETS[0].name)
    arena.evict(0, 1)
    load(arena, 2, 1, large)
    target = TARGETS[0].name
    arena.paged_module(target)
    assert arena.table.num_compactions == 1
    x, y = torch.randn(2, 32), torch.zeros(2, 48)
    reference.add_lora(y, x, arena.paged_module(target), torch.tensor([1, 2], dtype=torch.int32))
    torch.testing.assert_close(y, expected_delta(target, x, [1, 2], {1: small, 2: large}), rtol=1e-4, atol=1e-3)


def test_base_only_step_is_none() -> None:
    arena = make_arena()
    load(arena, 0, 1, pack(8))
    assert AdapterSteps(arena).begin(torch.full((5,), -1, dtype=torch.int32), []) is None
    assert AdapterSteps(arena).begin(torch.full((5,), -1, dtype=torch.int32), [0]) is None
    assert AdapterSteps(arena).begin(torch.zeros(0, dtype=torch.int32), []) is None


def test_module_of_no_adapter_of_the_step_is_left_alone() -> None:
    arena = make_arena()
    everywhere, only_q = pack(8), pack({"model.layers.0.q": 4}, seed=1)
    load(arena, 0, 1, everywhere)
    load(arena, 1, 1, only_q)
    assert begin_step(arena, [0, 1]) is not None
    step = AdapterSteps(arena).begin(torch.tensor([1], dtype=torch.int32), [1])
    assert step is not None
    assert step.targets("model.layers.0.q")
    assert not step.targets("model.layers.0.v")
    y = torch.full((1, 16), -0.0)
    step.apply("model.layers.0.v", torch.randn(1, 32), y)
    assert torch.signbit(y).all()


def test_adapter_with_zero_b_changes_nothing() -> None:
    packed = pack(8, edit=lambda a, b: b.zero_())
    arena = make_arena()
    load(arena, 0, 1, packed)
    step = AdapterSteps(arena).begin(torch.tensor([0, 0], dtype=torch.int32), [0])
    assert step is not None
    y = torch.randn(2, 48)
    before = y.clone()
    step.apply("model.layers.0.q", torch.randn(2, 32), y)
    assert torch.equal(y, before)


@pytest.mark.usefixtures("lora_form")
def test_wrong_adapter_under_slot_reuse() -> None:
    """64 adapters rotate through slots that hold 4; each step sees exactly the adapters of its plan."""
    adapters = [pack(1 + index % 24, seed=index) for index in range(64)]
    arena = make_arena(num_slots=4, arena_bytes=4 * pack(24).arena_bytes)
    held: dict[int, tuple[int, Packed]] = {}
    for index, packed in enumerate(adapters):
        slot = index % 4
        if slot in held:
            arena.evict(slot, held[slot][0])
        load(arena, slot, index + 1, packed)
        held[slot] = (index + 1, packed)
        run_step(arena, [*held, -1, slot], {s: p for s, (_, p) in held.items()}, seed=index)
    arena.check_invariants()


def test_small_rank_after_large_rank_in_the_same_slot() -> None:
    large, small = pack(61), pack(3, seed=1)
    arena = make_arena(num_slots=1, arena_bytes=large.arena_bytes)
    load(arena, 0, 1, large)
    run_step(arena, [0, 0], {0: large})
    arena.evict(0, 1)
    load(arena, 0, 2, small)
    run_step(arena, [0, -1], {0: small})
    x, y = torch.randn(1, 32), torch.zeros(1, 48)
    token_slots = torch.tensor([0], dtype=torch.int32)
    reference.add_lora(y, x, arena.paged_module("model.layers.0.q"), token_slots)
    torch.testing.assert_close(y, expected_delta("model.layers.0.q", x, [0], {0: small}), rtol=1e-4, atol=1e-3)


def test_rows_of_a_page_past_the_rank_are_zero() -> None:
    """A kernel that reads whole pages meets no weight of an earlier owner, and no rubbish."""
    large, small = pack(64), pack(3, seed=1)
    arena = make_arena(num_slots=1, arena_bytes=large.arena_bytes)
    load(arena, 0, 1, large)
    arena.evict(0, 1)
    load(arena, 0, 2, small)
    held = torch.from_numpy(arena.page_ids(0))
    assert (arena.table.pages[held, 3:] == 0).all()


@pytest.mark.usefixtures("lora_form")
def test_unload_while_in_use_is_refused() -> None:
    """The scheduler does not do this. A step that began before reads the pages where they lie, so that the next
    adapter of the slot would serve under the old one's name: the step refuses to be applied."""
    target = TARGETS[0].name
    arena = make_arena()
    load(arena, 0, 1, pack(8))
    load(arena, 1, 1, pack(8, seed=2))
    token_slots = torch.tensor([0, 1], dtype=torch.int32)
    step = AdapterSteps(arena).begin(token_slots, [0, 1])
    assert step is not None
    arena.evict(0, 1)
    x, y = torch.randn(2, 32), torch.zeros(2, 48)
    for refill in (False, True):
        if refill:
            load(arena, 0, 2, pack(8, seed=1))
        for use in (lambda: step.apply(target, x, y), lambda: step.native_tokens(1)):
            with pytest.raises(AssertionError, match="a slot changed after the step began"):
                use()
        assert torch.equal(y, torch.zeros(2, 48))
    with pytest.raises(StaleSlot, match="slot 0 holds generation 2, the plan names generation 1"):
        arena.check_all(token_slots.numpy(), np.array([1, 1]))
    run_step(arena, [0, 1], {0: pack(8, seed=1), 1: pack(8, seed=2)})


def test_a_load_beside_a_step_leaves_the_step_as_it_was() -> None:
    """What is published while a step runs is entered when the next one begins."""
    first = pack(8)
    arena = make_arena()
    load(arena, 0, 1, first)
    step = AdapterSteps(arena).begin(torch.tensor([0], dtype=torch.int32), [0])
    assert step is not None
    load(arena, 1, 1, pack(24, seed=1))
    x, y = torch.randn(1, 32), torch.zeros(1, 48)
    step.apply(TARGETS[0].name, x, y)
    torch.testing.assert_close(y, expected_delta(TARGETS[0].name, x, [0], {0: first}), rtol=1e-4, atol=1e-3)
    run_step(arena, [1, 0], {0: first, 1: pack(24, seed=1)})


def test_stale_generation_is_refused() -> None:
    arena = make_arena()
    load(arena, 2, 7, pack(8))
    arena.check(2, 7)
    for slot, generation in ((2, 6), (2, 8), (1, 7), (99, 7)):
        with pytest.raises(StaleSlot, match=f"slot {slot}"):
            arena.check(slot, generation)
        with pytest.raises(StaleSlot, match=f"slot {slot}"):
            arena.evict(slot, generation)
    slots = np.array([-1, 2, 2, -1], dtype=np.int32)
    arena.check_all(slots, np.array([0, 7, 7, 0]))
    with pytest.raises(StaleSlot, match="slot 2 holds generation 7, the plan names generation 8"):
        arena.check_all(slots, np.array([0, 7, 8, 0]))
    arena.evict(2, 7)
    with pytest.raises(StaleSlot, match="slot 2 is not ready, the plan names generation 7"):
        arena.check_all(slots, np.array([0, 7, 7, 0]))
    with pytest.raises(StaleSlot, match="slot 2 is not ready"):
        begin_step(arena, [2])
    load(arena, 2, 9, pack(8))
    arena.clear()
    with pytest.raises(StaleSlot, match="slot 2 is not ready, the plan names generation 9"):
        arena.check_all(slots, np.array([0, 9, 9, 0]))


def test_token_of_a_slot_that_the_step_does_not_name_is_refused() -> None:
    arena = make_arena()
    load(arena, 0, 1, pack(8))
    load(arena, 1, 1, pack(8, seed=1))
    with pytest.raises(StaleSlot, match=r"\[1\]"):
        AdapterSteps(arena).begin(torch.tensor([0, 1], dtype=torch.int32), [0])


def test_full_slot_is_not_overwritten() -> None:
    first = pack(8)
    arena = make_arena()
    load(arena, 0, 1, first)
    with pytest.raises(AdapterLoadError, match="slot 0 is not empty"):
        load(arena, 0, 2, pack(8, seed=1))
    with pytest.raises(AdapterLoadError, match="slot 4 is not one of the 4"):
        load(arena, 4, 1, first)
    run_step(arena, [0], {0: first})
