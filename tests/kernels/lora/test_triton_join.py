"""Parts of a shrink that the last program joins, and weights and slots far apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.cases import to_device
from kernels.lora import ModuleGroup, PagedModule, ops, triton_expand, triton_segments, triton_shrink
from kernels.lora.cases import Case, GroupInputs, make_group
from kernels.lora.launch import ShrinkLaunch
from kernels.lora.segments import COUNTS, AdapterSegments, segments_in_torch

NAN = float("nan")
GROUP = (32, 16)
# Slot 0 has a token more than a block of 16; ranks of one and of two tiles.
MIXED = Case("mixed", (1, -1, 2, 1) + (0,) * 17, (17, 3, 33), 150)


def counted(inputs: GroupInputs) -> AdapterSegments:
    """Segments that count what is done, as the device makes them."""
    segments = triton_segments.segments(inputs.token_slots, inputs.group.num_slots, 16, block=32)
    assert segments.num_done is not None
    assert segments.num_done.shape == (segments.num_blocks, COUNTS)
    assert not segments.num_done.any()
    return segments


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_joined_parts_have_the_bits_of_one_program_and_leave_the_counts_at_zero(
    dtype: torch.dtype, device: torch.device
) -> None:
    inputs = to_device(make_group(MIXED, GROUP, dtype), device)
    segments = counted(inputs)
    shape = (2, len(inputs.token_slots), 64)
    whole = torch.full((1, *shape), NAN, device=device)
    launch = ShrinkLaunch(16, 32)
    triton_shrink.shrink(inputs.x, whole, inputs.group, segments, parts=3, launch=launch)
    for _ in range(2):
        parts, joined = (torch.full((planes, *shape), NAN, device=device) for planes in (3, 1))
        triton_shrink.shrink(inputs.x, parts, inputs.group, segments, parts=3, joined=joined, launch=launch)
        assert torch.equal(joined.nan_to_num(nan=99.0), whole.nan_to_num(nan=99.0))
        assert segments.num_done is not None
        assert not segments.num_done.any()


def test_few_tokens_leave_one_plane(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the segments cannot count, and where there is more to count than room, the parts stay apart."""
    monkeypatch.setattr(ops, "runs_triton", lambda tensor: True)
    monkeypatch.setattr(triton_shrink, "num_parts", lambda in_features: 2)
    inputs = to_device(make_group(MIXED, GROUP, torch.bfloat16, is_exact=True), device)
    segments, uncounted = counted(inputs), segments_in_torch(inputs.token_slots, 3, 16)
    joined = ops.lora_shrink(inputs.x, inputs.group, segments, max_rank=33)
    apart = ops.lora_shrink(inputs.x, inputs.group, uncounted, max_rank=33)
    wide = ops.lora_shrink(inputs.x, inputs.group, segments, max_rank=512)
    assert (len(joined), len(apart), len(wide)) == (1, 2, 2)
    results = []
    for h in (joined, apart, wide):
        y = to_device(inputs.y, device)
        triton_expand.expand(h, y, inputs.group, segments, add_inputs=True)
        results.append(y)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], inputs.y)


@pytest.mark.parametrize("tile_width", [32, 8], ids=["whole tiles", "several tiles at once"])
def test_pages_past_2_to_the_31_values_are_read(device: torch.device, tile_width: int) -> None:
    """Of an arena of 4 GiB only the pages of one adapter are ever touched."""
    case = Case("near", (0, -1, 0), (9,), 64, 32, tile_width=tile_width)
    near = to_device(make_group(case, (32,), torch.bfloat16), device)
    module = near.group.module(0)
    first = (1 << 31) // (8 * tile_width) + 1
    pages = torch.empty(first + len(module.pages), 8, tile_width, dtype=torch.bfloat16, device=device)
    pages[first:] = module.pages
    far_module: PagedModule = replace(module, pages=pages, page_ids=module.page_ids + first)
    segments = segments_in_torch(near.token_slots, 1, 16)
    results = []
    for group in (near.group, ModuleGroup.of([far_module])):
        h, y = torch.zeros(1, 1, 3, 16, device=device), near.y.clone()
        triton_shrink.shrink(near.x, h, group, segments)
        triton_expand.expand(h, y, group, segments, add_inputs=True)
        results += [h, y]
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])
    assert not torch.equal(results[1], near.y)
