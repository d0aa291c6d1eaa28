"""The embedding's shrink in Triton against its definition: exact, since it only moves values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kernels.cases import to_device
from kernels.lora import reference, triton_embedding, triton_expand
from kernels.lora.cases import Case, make_group
from kernels.lora.segments import segments_in_torch

NAN = float("nan")
CASES = (
    Case("no token", (), (8,), 37),
    Case("odd vocabulary", (2, 0, 1, -1, 1, 2, 2, 3), (5, 33, 16, 0), 37, tile_width=16),
    Case("one page", (0, -1, 0), (17,), 33, tile_width=64),
    Case("every id its own page", (1, 0, 1), (3, 9), 5, tile_width=1),
)


def embedded(case: Case, device: torch.device, block_tokens: int, stride: int = 1) -> None:
    """Compare all of h, which begins as NaN, for ids that are known and two that are not."""
    module = to_device(make_group(case, (case.tile_width,), torch.bfloat16).group.module(0), device)
    slots = torch.tensor(case.token_slots, dtype=torch.int32, device=device)
    generator = torch.Generator().manual_seed(2)
    every = torch.randint(0, case.in_features, (stride * len(slots),), generator=generator).to(device)
    ids = every[::stride]
    ids[:2] = torch.tensor([-1, case.in_features], device=device)[: len(ids)]
    segments = segments_in_torch(slots, len(case.ranks), block_tokens)
    expected, h = (torch.full((len(slots), max(case.ranks)), NAN, device=device) for _ in range(2))
    reference.embed(ids, expected, module, segments)
    triton_embedding.embed(ids, h, module, segments)
    torch.testing.assert_close(h, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("block_tokens", [1, 16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_definition(case: Case, block_tokens: int, device: torch.device) -> None:
    embedded(case, device, block_tokens)


@settings(max_examples=8)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=4).flatmap(
        lambda ranks: st.tuples(st.just(tuple(ranks)), st.lists(st.integers(-1, len(ranks) - 1), max_size=20))
    ),
    st.integers(1, 60),
    st.integers(1, 20),
    st.integers(1, 2),
)
def test_random_embeddings(sizes: tuple[tuple[int, ...], list[int]], vocabulary: int, page: int, stride: int) -> None:
    ranks, slots = sizes
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    embedded(Case("random", tuple(slots), ranks, vocabulary, tile_width=page), device, 16, stride)


def test_pages_past_2_to_the_31_values_are_read(device: torch.device) -> None:
    """Of an arena of 4 GiB only the pages of these adapters are ever touched."""
    near = to_device(make_group(CASES[1], (16,), torch.bfloat16).group.module(0), device)
    first = (1 << 31) // near.pages[0].numel() + 1
    pages = torch.empty(first + len(near.pages), *near.pages.shape[1:], dtype=torch.bfloat16, device=device)
    pages[first:] = near.pages
    slots = torch.tensor(CASES[1].token_slots, dtype=torch.int32, device=device)
    ids, segments = torch.arange(len(slots), device=device), segments_in_torch(slots, 4, 16)
    results = []
    for module in (near, replace(near, pages=pages, page_ids=near.page_ids + first)):
        h = torch.zeros(len(slots), 33, device=device)
        triton_embedding.embed(ids, h, module, segments)
        results.append(h)
    assert torch.equal(*results) and results[0].any()


def test_a_rank_above_the_width_is_nan(device: torch.device) -> None:
    """The other slots are whole, and nothing is written past the width."""
    inputs = make_group(Case("rank", (0, 1), (8, 20), 37), (32,), torch.float32)
    group = to_device(inputs.group, device)
    segments = segments_in_torch(inputs.token_slots.to(device), 2, 16)
    wide = torch.full((1, 1, 2, 16), 7.0, device=device)
    triton_embedding.embed(torch.tensor([36, 0], device=device), wide[0, 0, :, :12], group.module(0), segments)
    assert wide[0, 0, 0, :8].isfinite().all()
    assert wide[0, 0, 1, :12].isnan().all()
    assert (wide[0, 0, :, 12:] == 7.0).all()
    y = torch.zeros(2, 32, device=device)
    triton_expand.expand(wide[..., :12], y, group, segments, add_inputs=True)
    assert y[0].isfinite().all()
    assert y[1].isnan().all()
