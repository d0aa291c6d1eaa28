"""Adapters inside experts in Triton: a slot of the kernels is a pair of an adapter's slot and an expert."""

from __future__ import annotations

import pytest
import torch

from kernels.cases import to_device
from kernels.lora import grouped_segments, reference, triton_expand, triton_shrink
from kernels.lora.cases import Case, GroupInputs, make_group
from kernels.lora.segments import AdapterSegments, blocks_of_one
from tests.kernels.tolerances import assert_close

NUM_SLOTS, NUM_EXPERTS = 3, 4
GATE_UP = (48, 48)
# Entry e * NUM_SLOTS + s. Slot 1 leaves out the experts 0 and 2; slot 2 has another rank for each expert.
RANKS = (8, 0, 1, 8, 17, 9, 8, 0, 33, 8, 3, 40)
# (slot, expert) of rows that are sorted by expert; -1: a row of the base model.
ROWS = [(0, 0), (-1, 0), (2, 0), (2, 1), (0, 1), (1, 1), (1, 2), (2, 2), (0, 2), (2, 3), (-1, 3), (1, 3)]
ENTRIES = tuple(expert * NUM_SLOTS + slot if slot >= 0 else -1 for slot, expert in ROWS)
EXPERTS = Case("experts", ENTRIES, RANKS)
# An expert that many rows chose.
CROWDED = Case("crowded", ENTRIES + (5,) * 19, RANKS)


def computed(inputs: GroupInputs, segments: AdapterSegments) -> torch.Tensor:
    y = to_device(inputs.y, inputs.y.device)
    h = torch.zeros(1, len(GATE_UP), segments.num_tokens, 64, device=y.device)
    triton_shrink.shrink(inputs.x, h, inputs.group, segments)
    triton_expand.expand(h, y, inputs.group, segments, add_inputs=True)
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [EXPERTS, CROWDED], ids=lambda case: case.name)
def test_rows_of_adapters_and_experts_are_those_of_the_definition(case: Case, dtype: torch.dtype) -> None:
    inputs = make_group(case, GATE_UP, dtype, is_uniform=True)
    y = computed(inputs, grouped_segments(inputs.token_slots, inputs.group.num_slots))
    expected = to_device(inputs.y, inputs.y.device)
    h = torch.zeros(len(GATE_UP), len(case.token_slots), 64, device=y.device)
    segments = blocks_of_one(inputs.token_slots, inputs.group.num_slots)
    reference.shrink(inputs.x, h, inputs.group, segments)
    reference.expand(h, expected, inputs.group, segments, add_inputs=True)
    assert_close(y, expected, magnitude=8)
    base = inputs.token_slots == -1
    assert torch.equal(y[base], inputs.y[base]), "rows of the base model changed"


def test_a_row_has_the_same_bits_alone_and_beside_others() -> None:
    inputs = make_group(EXPERTS, GATE_UP, torch.float32, is_uniform=True)
    together = computed(inputs, grouped_segments(inputs.token_slots, inputs.group.num_slots))
    for row in range(len(ROWS)):
        one = GroupInputs(
            inputs.x[row : row + 1],
            inputs.y[row : row + 1],
            inputs.token_slots[row : row + 1],
            inputs.group,
            inputs.max_rank,
        )
        alone = computed(one, grouped_segments(one.token_slots, inputs.group.num_slots))
        assert torch.equal(alone[0], together[row]), ROWS[row]
