"""What adapters add inside experts, against the definition row by row, in native code and in plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from contract.expert_names import of_expert
from data_plane.adapters.arena.scaled_columns import ScaledColumns
from data_plane.adapters.arena.slots import table_bytes
from data_plane.adapters.step.adapter_steps import AdapterSteps
from data_plane.adapters.step.expert_rows import ExpertRows
from data_plane.errors import PlanRefused
from data_plane.plan import TargetKind, TargetModule
from kernels.lora import grouped_segments
from kernels.lora.segments import segments_in_torch
from tests.data_plane.adapters.factories import Packed, load, make_arena, pack

NUM_EXPERTS, HIDDEN, WIDTH = 5, 32, 48
PATH = "model.layers.0.mlp.experts.*"
GATE, UP, DOWN = (f"{PATH}.{part}_proj" for part in ("gate", "up", "down"))
EXPERTS = [
    TargetModule(name, TargetKind.EXPERT, *sides, num_experts=NUM_EXPERTS)
    for name, sides in ((GATE, (HIDDEN, WIDTH)), (UP, (HIDDEN, WIDTH)), (DOWN, (WIDTH, HIDDEN)))
]
LINEAR = TargetModule("model.layers.0.q", TargetKind.LINEAR, HIDDEN, HIDDEN)
EACH = [one for target in EXPERTS for one in target.each()]
TARGETS = (LINEAR, *EACH)


FORMS = pytest.mark.usefixtures("lora_form")


def adapters() -> dict[int, Packed]:
    """All experts, some products of some experts, a linear alone, other ranks for every expert."""
    some = {of_expert(GATE, 1): 3, of_expert(DOWN, 1): 17, of_expert(UP, 4): 8}
    ranks = {of_expert(name, expert): 1 + 7 * expert for name in (GATE, UP, DOWN) for expert in range(NUM_EXPERTS)}
    chosen = ({target.name: 4 for target in EACH}, some, {LINEAR.name: 5}, ranks)
    return {slot: pack(each, targets=TARGETS, seed=slot, scaling=0.5) for slot, each in enumerate(chosen)}


def delta(name: str, x: torch.Tensor, slots: list[int], experts: list[int], held: dict[int, Packed]) -> torch.Tensor:
    """Row by row: scaling * x @ A.T @ B of the row's slot and expert."""
    out = next(target for target in EXPERTS if target.name == name).out_features
    rows = []
    for row, slot, expert in zip(x, slots, experts, strict=True):
        weights = held[slot].weights.get(of_expert(name, expert)) if slot in held else None
        rows.append(torch.zeros(out) if weights is None else weights[2] * (row @ weights[0].T) @ weights[1])
    return torch.stack(rows)


def begin(arena_slots: list[int], held: dict[int, Packed], experts: list[int], tokens: list[int]) -> ExpertRows | None:
    """The rows of a step: row i is token tokens[i] in expert experts[i]."""
    arena = make_arena(targets=TARGETS)
    for slot, packed in held.items():
        load(arena, slot, 1, packed)
    in_step = sorted({slot for slot in arena_slots if slot >= 0})
    step = AdapterSteps(arena).begin(torch.tensor(arena_slots, dtype=torch.int32), in_step)
    assert step is not None
    return step.expert_rows((GATE, UP, DOWN), torch.tensor(experts), torch.tensor(tokens))


@FORMS
def test_rows_of_all_adapters_and_experts_equal_the_packed_matrices() -> None:
    held, slots = adapters(), [0, -1, 3, 2, 1, 0, 3, 1]
    generator = np.random.default_rng(0)
    pairs = [(expert, token) for token in range(8) for expert in generator.permutation(NUM_EXPERTS)[:2].tolist()]
    experts, tokens = (list(column) for column in zip(*sorted(pairs), strict=True))
    rows = begin(slots, held, experts, tokens)
    assert rows is not None
    x, hidden = torch.randn(16, HIDDEN), torch.randn(16, WIDTH)
    of_rows = [slots[token] for token in tokens]
    for names, read in (((GATE, UP), x), ((DOWN,), hidden), ((UP,), x)):
        assert rows.targets(names)
        expected = torch.cat([delta(name, read, of_rows, experts, held) for name in names], dim=1)
        y = torch.full_like(expected, 2.0)
        rows.add(names, read, y)
        torch.testing.assert_close(y - 2.0, expected, rtol=1e-4, atol=1e-3)
        without = torch.tensor([slot in (-1, 2) for slot in of_rows])
        assert (y[without] == 2.0).all(), "rows without an adapter on experts changed"


def test_modules_of_experts_have_no_columns_for_scales_and_take_no_scale() -> None:
    """A mixture has ten thousand of them and more; the columns for scales are four for each row."""
    arena = make_arena(targets=TARGETS, num_scaled=1000)
    num_slots = arena.table.num_slots
    assert arena.table.size_bytes == table_bytes(TARGETS, num_slots, 1000) == 28 * (num_slots * len(TARGETS) + 1000)
    held = adapters()
    for slot, packed in held.items():
        load(arena, slot, 1, packed)
    arena.list_published()
    columns = ScaledColumns(arena.table)
    with pytest.raises(PlanRefused, match="slot 0 has an adapter on experts, which takes no scale"):
        columns.take(0, 1, 0.5, is_linear=False)
    scaled = columns.take(2, 1, 0.5, is_linear=False)  # of a linear alone
    step = AdapterSteps(arena).begin(torch.tensor([0, scaled, 3, -1], dtype=torch.int32), [0, scaled, 3])
    assert step is not None
    x, experts, tokens = torch.randn(4, HIDDEN), [0, 1, 1, 4], [0, 1, 2, 3]
    rows = step.expert_rows((GATE,), torch.tensor(experts), torch.tensor(tokens))
    assert rows is not None
    y = torch.zeros(4, WIDTH)
    rows.add((GATE,), x, y)
    torch.testing.assert_close(y, delta(GATE, x, [0, -1, 3, -1], experts, held), rtol=1e-4, atol=1e-3)
    y = torch.zeros(4, HIDDEN)
    step.apply(LINEAR.name, x, y)
    a, b, scaling = held[2].weights[LINEAR.name]
    torch.testing.assert_close(y[1], 0.5 * scaling * (x[1] @ a.T) @ b, rtol=1e-4, atol=1e-3)
    assert not y[[0, 2, 3]].any()


@FORMS
def test_a_row_has_the_same_bits_alone_and_beside_others() -> None:
    held, slots = adapters(), [0, 3, -1, 1]
    pairs = sorted((expert, token) for token in range(4) for expert in range(NUM_EXPERTS))
    x = torch.randn(len(pairs), HIDDEN)
    experts, tokens = (list(column) for column in zip(*pairs, strict=True))
    together = begin(slots, held, experts, tokens)
    assert together is not None
    y = torch.zeros(len(pairs), 2 * WIDTH)
    together.add((GATE, UP), x, y)
    for row, (expert, token) in enumerate(pairs):
        if slots[token] < 0:
            continue
        alone = begin([slots[token]], held, [expert], [0])
        assert alone is not None
        own = torch.zeros(1, 2 * WIDTH)
        alone.add((GATE, UP), x[row : row + 1], own)
        assert torch.equal(own[0], y[row]), (expert, token)


def test_a_step_whose_adapters_leave_experts_alone_costs_nothing() -> None:
    assert begin([2, -1], adapters(), [0, 1], [0, 1]) is None
    rows = begin([1], {1: pack({of_expert(DOWN, 0): 2}, targets=TARGETS)}, [0, 1], [0, 0])
    assert rows is not None and rows.targets((DOWN,)) and not rows.targets((GATE, UP))


@FORMS
def test_a_slot_that_is_filled_again_has_its_new_experts() -> None:
    """The old adapter had all experts, the new one has one of them."""
    arena = make_arena(targets=TARGETS)
    old, new = adapters()[0], pack({of_expert(DOWN, 3): 20}, targets=TARGETS, seed=9)
    hidden, experts = torch.randn(2, WIDTH), torch.tensor([1, 3])
    for generation, packed in ((1, old), (2, new)):
        if generation > 1:
            arena.evict(0, 1)
        load(arena, 0, generation, packed)
        step = AdapterSteps(arena).begin(torch.tensor([0], dtype=torch.int32), [0])
        assert step is not None
        rows = step.expert_rows((GATE, UP, DOWN), experts, torch.zeros(2, dtype=torch.int64))
        assert rows is not None
        y = torch.zeros(2, HIDDEN)
        rows.add((DOWN,), hidden, y)
        torch.testing.assert_close(y, delta(DOWN, hidden, [0, 0], [1, 3], {0: packed}), rtol=1e-4, atol=1e-3)
    assert (y[0] == 0).all()


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 40, 600])
@pytest.mark.parametrize("num_slots", [1, 3, 50])
def test_segments_by_sorting_are_those_of_the_definition(num_tokens: int, num_slots: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    slots = torch.randint(-2, num_slots + 2, (num_tokens,), generator=generator).to(torch.int32)
    found = grouped_segments(slots, num_slots)
    expected = segments_in_torch(slots, num_slots, found.block_tokens)
    for name in ("order", "block_slot", "block_start", "block_end"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
