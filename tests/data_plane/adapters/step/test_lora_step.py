"""Steps over the arena's pages, in native code and in plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from data_plane.adapters.arena.scaled_columns import ScaledColumns
from data_plane.adapters.step import lora_step
from data_plane.adapters.step.adapter_steps import AdapterSteps
from data_plane.adapters.step.further_columns import FurtherColumns
from data_plane.errors import ArenaFull, StaleSlot
from tests.data_plane.adapters.factories import TARGETS, expected_delta, load, make_arena, pack, run_step

FORMS = pytest.mark.usefixtures("lora_form")


@FORMS
def test_mixed_step_equals_the_packed_matrices() -> None:
    adapters = {slot: pack(rank, seed=slot) for slot, rank in enumerate((1, 8, 13, 64))}
    arena = make_arena()
    for slot, packed in adapters.items():
        load(arena, slot, slot + 1, packed)
    for slots in ([0, -1, 3, 2, 1, 1, 0], [2], [1, -1], [3, 3, 0]):
        run_step(arena, slots, adapters)


def test_a_slot_that_is_filled_again_has_its_new_adapter() -> None:
    """Of a greater rank, and of the same generation once all slots were cleared."""
    arena = make_arena()
    old, new, last = pack(4), pack(20, seed=1), pack(30, seed=2)
    load(arena, 0, 1, old)
    run_step(arena, [0], {0: old})
    arena.evict(0, 1)
    load(arena, 0, 2, new)
    run_step(arena, [0, -1], {0: new})
    arena.clear()
    load(arena, 0, 2, last)
    run_step(arena, [0], {0: last})


@FORMS
def test_fused_modules_equal_the_packed_matrices() -> None:
    """Side by side in the table or apart, in any order; slot 1 leaves a target module out, slot 2 all of them."""
    arena = make_arena()
    q, v, up = (target.name for target in TARGETS[:3])
    adapters = {0: pack(13), 1: pack({q: 3, up: 20}, seed=1), 2: pack({TARGETS[3].name: 2}, seed=2)}
    for slot, packed in adapters.items():
        load(arena, slot, 1, packed)
    slots = [0, -1, 1, 1, 2, 0]
    step = AdapterSteps(arena).begin(torch.tensor(slots, dtype=torch.int32), [0, 1, 2])
    assert step is not None
    for names, num_groups in (((q, v, up), 1), ((v, up, q), 2), ((up, v), 2), ((v,), 1)):
        assert len(arena.groups.of(names)) == num_groups
        x = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
        deltas = [expected_delta(name, x, slots, adapters) for name in names]
        y = torch.cat([torch.full_like(delta, index) for index, delta in enumerate(deltas)], dim=1)
        expected = y + torch.cat(deltas, dim=1)
        step.apply_group(names, x, y)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-3)
    with pytest.raises(RuntimeError, match="split_with_sizes"):
        step.apply_group((q, v), torch.randn(6, 32), torch.zeros(6, 65))


def test_fused_modules_follow_a_slot_that_is_filled_again() -> None:
    """The groups were made for the first adapter and are not made again."""
    arena = make_arena()
    names = tuple(target.name for target in TARGETS[:3])
    for generation, packed in enumerate((pack(4), pack(20, seed=1)), 1):
        load(arena, 2, generation, packed)
        step = AdapterSteps(arena).begin(torch.tensor([2, -1], dtype=torch.int32), [2])
        assert step is not None
        x, y = torch.randn(2, 32), torch.zeros(2, 144)
        step.apply_group(names, x, y)
        deltas = [expected_delta(name, x, [2, -1], {2: packed}) for name in names]
        torch.testing.assert_close(y, torch.cat(deltas, dim=1), rtol=1e-4, atol=1e-3)
        arena.evict(2, generation)


@pytest.mark.parametrize("kinds", ["linear", "products", "both", "plain"])
def test_halves_that_are_computed_apart_add_what_one_call_adds(kinds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU. Also in steps whose only adapters are combined as sums of their A and B."""
    arena = make_arena(num_scaled=8)
    for slot in range(3):
        load(arena, slot, 1, pack(3 + slot, seed=slot))
    arena.list_published()
    scaled = ScaledColumns(arena.table)
    linear, others = (
        np.array([column, -1, column, -1], dtype=np.int32)
        for column in (scaled.take(0, 1, 0.5, is_linear=True), scaled.take(1, 1, -2.0, is_linear=True))
    )
    first = np.array([-1, 1, -1, 2] if kinds != "linear" else [-1] * 4, dtype=np.int32)
    further = FurtherColumns(
        (np.array([-1, 2, -1, 0], dtype=np.int32),) if kinds in ("products", "both") else (),
        (linear, others) if kinds in ("linear", "both") else (),
    )
    named = sorted({int(column) for columns in (first, *further.every) for column in columns} - {-1})
    step = AdapterSteps(arena).begin(torch.from_numpy(first), named, further)
    assert step is not None
    monkeypatch.setattr(lora_step, "shrinks_apart", lambda _: True)
    q, v, up = (target.name for target in TARGETS[:3])
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    for names in ((q, v, up), (v, up, q), (up,)):
        at_once = torch.zeros(4, sum(target.out_features for target in TARGETS[:3] if target.name in names))
        apart = at_once.clone()
        step.apply_group(names, x, at_once)
        shrunk = step.shrink(names, x)
        assert shrunk is not None
        expansion = step.expand(shrunk, x, apart)
        if expansion is not None:
            expansion.add()
        assert at_once.any()
        torch.testing.assert_close(apart, at_once)


def test_modules_that_no_adapter_targets_are_left_alone() -> None:
    arena = make_arena()
    packed = pack({TARGETS[0].name: 3})
    load(arena, 1, 1, packed)
    step = AdapterSteps(arena).begin(torch.tensor([1, -1], dtype=torch.int32), [1])
    assert step is not None
    assert [step.targets(target.name) for target in TARGETS] == [True] + [False] * (len(TARGETS) - 1)
    x, y = torch.randn(2, TARGETS[1].in_features), torch.randn(2, TARGETS[1].out_features)
    before = y.clone()
    step.apply(TARGETS[1].name, x, y)
    assert torch.equal(y, before)
    x, y = torch.randn(2, TARGETS[0].in_features), torch.zeros(2, TARGETS[0].out_features)
    step.apply(TARGETS[0].name, x, y)
    torch.testing.assert_close(y, expected_delta(TARGETS[0].name, x, [1, -1], {1: packed}))


def test_tokens_of_a_slot_that_the_step_does_not_name_are_refused() -> None:
    arena = make_arena()
    load(arena, 0, 1, pack(4))
    load(arena, 1, 1, pack(4, seed=1))
    with pytest.raises(StaleSlot, match=r"tokens name the slots \[1\]"):
        AdapterSteps(arena).begin(torch.tensor([0, 1], dtype=torch.int32), [0])
    assert AdapterSteps(arena).begin(torch.tensor([-1, -1], dtype=torch.int32), [0]) is None


@FORMS
@pytest.mark.parametrize(("rank", "has_vectors"), [(8, False), (64, False), (8, True)])
def test_an_adapter_of_zeros_targets_every_module_and_adds_nothing(rank: int, has_vectors: bool) -> None:
    """Also in pages that held NaN; it takes no more than its largest target module does, 80 and 32 columns."""
    needed_bytes = rank * (80 + 32) * 4 + (8 * 16 * 4 if has_vectors else 0)
    arena = make_arena(arena_bytes=needed_bytes)
    arena.load_zeros(1, 5, rank, has_vectors=has_vectors)
    assert arena.used_bytes() == needed_bytes
    step = AdapterSteps(arena).begin(torch.tensor([1, -1, 1], dtype=torch.int32), [1])
    assert step is not None
    for target in TARGETS:
        assert step.targets(target.name)
        x, y = torch.randn(3, target.in_features), torch.randn(3, target.out_features)
        before = y.clone()
        step.apply(target.name, x, y)
        if has_vectors:
            torch.testing.assert_close(y, before)  # the base's bias is taken off and put back
        else:
            assert torch.equal(y, before)
    arena.evict(1, 5)
    with pytest.raises(ArenaFull):
        arena.load_zeros(0, 1, 2 * rank)
    assert arena.used_bytes() == 0
    arena.check_invariants()
