"""row_state's definition on the host: what a step of decoding rows reads, and what it leaves."""

from __future__ import annotations

import pytest
import torch

from kernels.row_state import DraftTokens, RowState, decode_inputs, store_differences, store_tokens
from kernels.row_state.cases import CASES, Case, make, no_drafts


def state_of(computed: list[int], prompt: list[int], slots: list[int], tables: list[list[int]]) -> RowState:
    return RowState(
        torch.arange(len(computed)) + 40,
        torch.tensor(computed, dtype=torch.int32),
        torch.tensor(prompt, dtype=torch.int32),
        torch.tensor(slots, dtype=torch.int32),
        torch.tensor(tables, dtype=torch.int32),
    )


def test_the_example_of_the_docstring() -> None:
    state = state_of([0, 0, 0, 8], [1, 1, 1, 5], [0, 0, 0, 6], [[0] * 3] * 3 + [[7, 2, 9]])
    rows = torch.tensor([3], dtype=torch.int32)
    found = decode_inputs(state, rows, 4, no_drafts(rows))
    assert found.input_ids.tolist() == [43] and found.positions.tolist() == [8]
    assert found.kv_positions.tolist() == [36] and found.context_lens.tolist() == [9]
    assert found.completion_index.tolist() == [4] and found.token_slots.tolist() == [6]
    assert state.num_computed.tolist() == [0, 0, 0, 9]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_row_of_a_step_is_advanced_by_one_and_no_other(case: Case) -> None:
    state, rows = make(case)
    before, last = state.num_computed.clone(), state.last_tokens.clone()
    found = decode_inputs(state, rows, case.block_size, no_drafts(rows))
    for index, row in enumerate(case.rows):
        if row < 0:
            values = (found.input_ids, found.positions, found.kv_positions, found.context_lens, found.completion_index)
            assert [int(value[index]) for value in values] == [0, 0, -1, 0, 0]
            assert int(found.token_slots[index]) == -1
            continue
        position = int(before[row])
        block = int(state.block_tables[row, position // case.block_size])
        assert int(found.input_ids[index]) == int(last[row]) and int(found.positions[index]) == position
        assert int(found.kv_positions[index]) == block * case.block_size + position % case.block_size
        assert int(found.context_lens[index]) == position + 1
        assert int(found.completion_index[index]) == position + 1 - int(state.num_prompt[row])
        assert int(found.token_slots[index]) == int(state.slots[row])
    chosen = [row for row in case.rows if row >= 0]
    before[chosen] += 1
    assert torch.equal(state.num_computed, before)


def test_drafts_follow_their_row_and_leave_its_state() -> None:
    state = state_of([0, 0, 0, 8], [1, 1, 1, 5], [0, 0, 0, 6], [[0] * 3] * 3 + [[7, 2, 9]])
    rows, ahead, ids = (torch.tensor(values, dtype=torch.int32) for values in ([3, 3, -1], [0, 1, 0], [0, 77, 0]))
    found = decode_inputs(state, rows, 4, DraftTokens(ahead, ids))
    assert found.input_ids.tolist() == [43, 77, 0] and found.positions.tolist() == [8, 9, 0]
    assert found.kv_positions.tolist() == [36, 37, -1] and found.context_lens.tolist() == [9, 10, 0]
    assert found.completion_index.tolist() == [4, 5, 0] and found.token_slots.tolist() == [6, 6, -1]
    assert state.num_computed.tolist() == [0, 0, 0, 8]
    with pytest.raises(ValueError, match=r"ahead is torch.int32 \(2,\), want int32 \(3,\)"):
        decode_inputs(state, rows, 4, DraftTokens(ahead[:2], ids))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tokens_are_stored_for_rows_alone(case: Case) -> None:
    state, rows = make(case)
    expected = state.last_tokens.clone()
    tokens = torch.arange(len(rows)) + 7
    for index, row in enumerate(case.rows):
        if row >= 0:
            expected[row] = tokens[index]
    store_tokens(state.last_tokens, rows, tokens)
    assert torch.equal(state.last_tokens, expected)


def test_what_is_no_row_number_is_refused() -> None:
    state, rows = make(CASES[1])
    with pytest.raises(ValueError, match=r"rows is torch.int64 \(1,\), want int32 \[n\]"):
        decode_inputs(state, rows.long(), 16, no_drafts(rows))
    with pytest.raises(ValueError, match=r"tokens is torch.int64 \(2,\), want int64 \(1,\)"):
        store_tokens(state.last_tokens, rows, torch.zeros(2, dtype=torch.int64))


def test_differences_change_their_places_alone() -> None:
    whole = torch.arange(6, dtype=torch.int32)
    store_differences(whole, torch.tensor([4, 0, -7, 9], dtype=torch.int32))
    assert whole.tolist() == [9, 1, 2, 3, -7, 5]
    store_differences(whole, torch.zeros(0, dtype=torch.int32))
    assert whole.tolist() == [9, 1, 2, 3, -7, 5]


def test_what_is_no_list_of_differences_is_refused() -> None:
    whole = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"differences is torch.int64 \(2,\), want int32 \[n\], dense"):
        store_differences(whole, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="differences has 3 elements, want as many places as values"):
        store_differences(whole, torch.zeros(3, dtype=torch.int32))
