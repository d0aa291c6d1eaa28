"""adapter_segments in Triton against its definition, and the definition against a plain loop."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kernels.lora import adapter_segments, triton_segments
from kernels.lora.segments import AdapterSegments, max_blocks, segments_in_torch

TOKEN_SLOTS = {
    "no token": ([], 4),
    "one token": ([2], 4),
    "none has an adapter": ([-1, -1, -1], 4),
    "one slot": ([0] * 7, 1),
    "gaps": ([5, -1, 0, 5, 2, 2, 5, -1, 5], 6),
    "more slots than tokens": ([9, 3, 9], 11),
    "a slot beyond the table has none": ([0, 9, 1, 4], 4),
    "several blocks": ([1] * 37 + [0, -1] * 5 + [3] * 16, 4),
}


def plain(slots: list[int], num_slots: int, block_tokens: int) -> dict[str, list[int]]:
    """By Python lists."""
    order: list[int] = []
    blocks: list[tuple[int, int, int]] = []
    for slot in range(num_slots):
        tokens = [token for token, named in enumerate(slots) if named == slot]
        start, end = len(order), len(order) + len(tokens)
        order += tokens
        blocks += [(slot, first, min(first + block_tokens, end)) for first in range(start, end, block_tokens)]
    order += [-1] * (len(slots) - len(order))
    blocks += [(-1, 0, 0)] * (max_blocks(len(slots), num_slots, block_tokens) - len(blocks))
    return {
        "order": order,
        "block_slot": [block[0] for block in blocks],
        "block_start": [block[1] for block in blocks],
        "block_end": [block[2] for block in blocks],
        "token_slots": slots,
    }


def lists(segments: AdapterSegments) -> dict[str, list[int]]:
    """Of the tokens and blocks; what counts is zero where there is any."""
    assert segments.num_done is None or not segments.num_done.any()
    values = {field.name: getattr(segments, field.name) for field in fields(segments) if field.name != "num_done"}
    return {name: value.tolist() for name, value in values.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("name", TOKEN_SLOTS)
@pytest.mark.parametrize("block_tokens", [1, 4, 16])
def test_both_equal_a_plain_loop(name: str, block_tokens: int, device: torch.device) -> None:
    slots, num_slots = TOKEN_SLOTS[name]
    token_slots = torch.tensor(slots, dtype=torch.int32, device=device)
    expected = plain(slots, num_slots, block_tokens)
    assert lists(segments_in_torch(token_slots, num_slots, block_tokens)) == expected
    assert lists(triton_segments.segments(token_slots, num_slots, block_tokens, block=16)) == expected


@pytest.mark.parametrize("name", TOKEN_SLOTS)
@pytest.mark.parametrize("block_tokens", [1, 4, 16])
def test_blocks_for_the_slots_of_the_tokens_are_the_first_of_all(
    name: str, block_tokens: int, device: torch.device
) -> None:
    """What is left out are blocks of no slot."""
    slots, num_slots = TOKEN_SLOTS[name]
    num_groups = len({slot for slot in slots if 0 <= slot < num_slots})
    token_slots = torch.tensor(slots, dtype=torch.int32, device=device)
    every = lists(segments_in_torch(token_slots, num_slots, block_tokens))
    fewer = lists(segments_in_torch(token_slots, num_slots, block_tokens, num_groups))
    num_blocks = len(fewer["block_slot"])
    of_tokens = ("order", "token_slots")
    assert fewer == {part: values if part in of_tokens else values[:num_blocks] for part, values in every.items()}
    assert not any(slot >= 0 for slot in every["block_slot"][num_blocks:])
    assert lists(triton_segments.segments(token_slots, num_slots, block_tokens, num_groups, block=16)) == fewer


@pytest.mark.parametrize(
    ("num_tokens", "num_adapters", "num_blocks"),
    [(1, 1, 1), (64, 8, 11), (64, 64, 64), (256, 8, 23), (256, 64, 76), (256, 9, 31), (256, 16, 31)],
)
def test_blocks_follow_the_adapters_of_a_step_not_the_slots_of_the_table(
    num_tokens: int, num_adapters: int, num_blocks: int
) -> None:
    """Each block is a row of programs in every launch of the LoRA kernels. Without the number they are min(T, 256)."""
    slots = (torch.arange(num_tokens, dtype=torch.int32) % num_adapters) * 3
    assert adapter_segments(slots, 256, num_groups=num_adapters).num_blocks == num_blocks
    assert adapter_segments(slots, 256).num_blocks == num_tokens


@settings(max_examples=12)
@given(st.integers(1, 9), st.lists(st.integers(-1, 8), max_size=60), st.sampled_from([1, 3, 16]))
def test_random_segments(num_slots: int, slots: list[int], block_tokens: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    token_slots = torch.tensor(slots, dtype=torch.int32, device=device)
    expected = plain(slots, num_slots, block_tokens)
    assert lists(segments_in_torch(token_slots, num_slots, block_tokens)) == expected
    assert lists(triton_segments.segments(token_slots, num_slots, block_tokens, block=32)) == expected
    num_groups = len({slot for slot in slots if 0 <= slot < num_slots})
    fewer = lists(triton_segments.segments(token_slots, num_slots, block_tokens, num_groups, block=32))
    assert fewer == lists(segments_in_torch(token_slots, num_slots, block_tokens, num_groups))
    assert [slot for slot in fewer["block_slot"] if slot >= 0] == [s for s in expected["block_slot"] if s >= 0]


def test_example_of_the_docstring() -> None:
    segments = adapter_segments(torch.tensor([7, -1, 2, 7, 7], dtype=torch.int32), 8, block_tokens=2)
    assert lists(segments) == {
        "order": [2, 0, 3, 4, -1],
        "block_slot": [2, 7, 7, -1, -1],
        "block_start": [0, 1, 3, 0, 0],
        "block_end": [1, 3, 4, 0, 0],
        "token_slots": [7, -1, 2, 7, 7],
    }


def test_sizes_do_not_depend_on_the_slots_that_tokens_name() -> None:
    both = [adapter_segments(torch.full((100,), slot, dtype=torch.int32), 8) for slot in (-1, 3)]
    assert len({segments.num_blocks for segments in both}) == 1


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"token_slots is torch\.int64 \[2\], want int32 \[num_tokens\]"):
        adapter_segments(torch.tensor([0, 1]), 4)
    with pytest.raises(ValueError, match="num_slots is 0"):
        adapter_segments(torch.tensor([0], dtype=torch.int32), 0)
    for wrong in (0, 33):
        with pytest.raises(ValueError, match=f"block_tokens is {wrong}, want 1 to 32"):
            adapter_segments(torch.tensor([0], dtype=torch.int32), 4, block_tokens=wrong)
